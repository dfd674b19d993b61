"""Made-up intents in the form of CLINC150's files: actions on objects, in many words."""

import json

import numpy as np

ACTIONS = {
    "find": ["find", "look for", "where is", "search for"],
    "cancel": ["cancel", "drop", "get rid of", "call off"],
    "change": ["change", "move", "update", "fix"],
    "cost": ["what is the price of", "how much is", "cost of", "do i pay for"],
    "order": ["order", "buy", "get me", "book"],
}
OBJECTS = {
    "flight": ["flight", "plane", "ticket to rome", "ticket to oslo"],
    "meal": ["meal", "pizza", "dinner", "lunch box"],
    "card": ["card", "credit card", "visa"],
    "room": ["room", "hotel", "place to stay"],
    "song": ["song", "tune", "record", "track"],
}
OTHER_ACTIONS = ["who found", "how tall is", "why do people like", "what is the end of", "look at"]
OTHER_OBJECTS = ["volcano", "river", "president", "hotel", "pizza", "tune", "box", "place"]
BEFORE = ["", "please", "can you", "i want you to", "hey", "listen", "could you help and"]
AFTER = ["", "", "now", "for me", "as soon as you can", "today", "for {}", "for {} on {}", "at {}"]


def _sentence(random, names, action, thing):
    rare = [f"name{int(names ** random.random())}" for _ in range(2)]  # some often, most seldom
    after = str(random.choice(AFTER)).format(*rare)
    parts = [random.choice(BEFORE), action, random.choice(["the", "a", "my"]), thing, after]
    return " ".join(str(part) for part in parts if part)


def intent_texts(
    sizes=(40, 8, 12), outside=(20, 20, 120), seed=0, noise=0.05, variants=1, names=200
):
    """The content of a file of 25 intents, or 25 for each variant, with so many texts of each.

    A share `noise` of the texts in scope has the action of any intent; `names` is the number of
    words that mean nothing.
    """
    random = np.random.default_rng(seed)
    content = {}
    for part, size in zip(("train", "val", "test"), sizes, strict=True):
        content[part] = []
        for action, thing, variant in np.ndindex(5, 5, variants):
            own, kind = list(ACTIONS)[action], list(OBJECTS)[thing]
            for _ in range(size):
                said = random.choice(list(ACTIONS)) if random.random() < noise else own
                words = f"kind{variant} " * (variants > 1) + random.choice(OBJECTS[kind])
                text = _sentence(random, names, random.choice(ACTIONS[said]), words)
                content[part].append([text, f"{own}_{kind}_{variant}"])
    for part, size in zip(("oos_train", "oos_val", "oos_test"), outside, strict=True):
        said = zip(
            *(random.choice(words, size) for words in (OTHER_ACTIONS, OTHER_OBJECTS)), strict=True
        )
        content[part] = [[_sentence(random, names, *words), "oos"] for words in said]
    return content


def write_intents(path, content):
    """Write a file."""
    path.write_text(json.dumps(content), encoding="utf-8")
