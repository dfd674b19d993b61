"""Made-up intents in the form of CLINC150's files: actions on objects, in many words."""

import json

import numpy as np

ACTIONS = {
    "find": ["find", "where is"],
    "cancel": ["cancel", "call off"],
    "order": ["order", "buy"],
}
OBJECTS = {"flight": ["flight", "plane"], "meal": ["meal", "pizza"], "song": ["song", "tune"]}
BEFORE, AFTER = ["", "please", "can you"], ["", "now", "for name1", "for name2 today"]
OTHERS = ["who found the volcano", "how tall is the river", "why do people like the president"]


def intent_texts(sizes=(8, 5, 5), num_outside=6):
    """The content of a file of nine intents, with so many texts of each in train, val and test."""
    random = np.random.default_rng(0)

    def sentence(words):
        parts = (random.choice(BEFORE), *words, random.choice(AFTER))
        return " ".join(str(part) for part in parts if part)

    content = {
        part: [
            [sentence([random.choice(ACTIONS[own]), "the", random.choice(OBJECTS[kind])]),
             f"{own}_{kind}"]
            for own in ACTIONS for kind in OBJECTS for _ in range(size)
        ]
        for part, size in zip(("train", "val", "test"), sizes, strict=True)
    }  # fmt: skip
    for part in ("oos_train", "oos_val", "oos_test"):
        content[part] = [[sentence([random.choice(OTHERS)]), "oos"] for _ in range(num_outside)]
    return content


def write_intents(path, content):
    """Write a file."""
    path.write_text(json.dumps(content), encoding="utf-8")
