"""Real clients: the Flax models of Hugging Face transformers, tiny, with random weights.

A language model is read at its last token and padded on the left, as generation does; T5's encoder at
its mean. With all tokens of a causal model of two layers read, `Separable` pools the first alone, and
sds are off by .13 in GPT-2, Llama and GPT-Neo, .14 in OPT, .20 in Mistral; in `Full` by .02 to .05.
Mistral of two layers, read at a token of padding, is off by .14.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

import moment_jax as mj
from tests.propagation.sampled import assert_refused, beside_sampled

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("ranks_of_a_user", "_as_published")]

T = 7
random = np.random.default_rng(0)
IDS = jnp.asarray(random.integers(3, 40, (2, T)), jnp.int32)
VALID = jnp.asarray(np.arange(T) < [[5], [T]], jnp.int32)
LATER = VALID[:, ::-1]
IMAGE = jnp.asarray(random.normal(size=(2, 8, 8, 3)), jnp.float32)


@pytest.fixture
def _as_published(monkeypatch):
    """Without float64, and with names of arguments of `jnp.clip` that jax has dropped since."""
    clip = jnp.clip

    def former(x, a_min=None, a_max=None, **options):
        return clip(x, options.get("min", a_min), options.get("max", a_max))

    monkeypatch.setattr(jnp, "clip", former)
    with jax.enable_x64(False):
        yield


class Client(NamedTuple):
    model: str  # Flax class, without "Flax"
    call: str
    inputs: tuple[jax.Array, ...]
    options: dict[str, Any]  # of the configuration
    refused: str | None = None  # what the pass says that cannot take it


def places(ids):
    return jnp.broadcast_to(jnp.arange(ids.shape[1])[None], ids.shape)


CALLS = {  # of a module, with arrays
    "classifier": lambda net, ids, mask: net(ids, mask, jnp.zeros_like(ids), places(ids), None).logits,
    "decoder": lambda net, ids, mask: net(ids, mask, places(ids)).logits[:, -1],
    "short": lambda net, ids, mask: net(ids, mask).logits,
    "bloom": lambda net, ids, mask: net(ids, mask).logits[:, -1],
    "seq2seq": lambda net, ids, mask: net(
        ids, mask, ids[:, :4], jnp.ones_like(ids[:, :4]), places(ids), places(ids[:, :4])
    ).logits[:, -1],
    "albert": lambda net, ids, mask: net(ids, mask, jnp.zeros_like(ids), places(ids)).logits,
    "encoder": lambda net, ids, mask: net(ids, mask).last_hidden_state.mean(1),
    "t5": lambda net, ids, mask: net(ids, mask, ids[:, :4], jnp.ones_like(ids[:, :4])).logits[:, -1],
    "image": lambda net, pixels: net(pixels).logits,
    "beit": lambda net, pixels: net(pixels, None).logits,
    "pooled": lambda net, pixels: net(pixels).pooler_output,
}  # fmt: skip


SIZES = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
SIZES |= {"vocab_size": 40, "intermediate_size": 24, "max_position_embeddings": 32, "num_labels": 3}
PICTURE = SIZES | {"image_size": 8, "patch_size": 4}
PAIR = {"vocab_size": 40, "d_model": 16, "encoder_layers": 1, "decoder_layers": 1}
PAIR |= {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 24}
PAIR |= {"decoder_ffn_dim": 24, "max_position_embeddings": 32}
T5 = {"vocab_size": 40, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2}
NEO = {"num_layers": 2, "attention_types": [[["global", "local"], 1]], "window_size": 3}
MISTRAL = {"num_attention_heads": 4, "num_key_value_heads": 2, "sliding_window": 4}
GEMMA = {"num_key_value_heads": 1, "head_dim": 8, "hidden_activation": "gelu_pytorch_tanh"}
OPT = {"ffn_dim": 24, "word_embed_proj_dim": 16}
ALBERT = {"embedding_size": 8, "num_hidden_layers": 2}
DISTILBERT = {"hidden_dim": 24}
BEIT = {"use_relative_position_bias": True}
TWICE = "a random array in common"  # one block is called twice
TEXT, CAUSAL, PIXELS = (IDS, VALID), (IDS, LATER), (IMAGE,)

CLIENTS = {
    "albert": Client("AlbertForSequenceClassification", "albert", TEXT, SIZES | ALBERT, TWICE),
    "bart": Client("BartForConditionalGeneration", "seq2seq", TEXT, PAIR),
    "beit": Client("BeitForImageClassification", "beit", PIXELS, PICTURE | BEIT),
    "bert": Client("BertForSequenceClassification", "classifier", TEXT, SIZES),
    "bloom": Client("BloomForCausalLM", "bloom", CAUSAL, SIZES),
    "clip_vision": Client("CLIPVisionModel", "pooled", PIXELS, PICTURE),
    "dinov2": Client("Dinov2ForImageClassification", "image", PIXELS, PICTURE | {"mlp_ratio": 2}),
    "distilbert": Client("DistilBertForSequenceClassification", "short", TEXT, SIZES | DISTILBERT),
    "gemma": Client("GemmaForCausalLM", "decoder", CAUSAL, SIZES | GEMMA),
    "gpt2": Client("GPT2LMHeadModel", "decoder", CAUSAL, SIZES),
    "gpt_j": Client("GPTJForCausalLM", "decoder", CAUSAL, SIZES | {"rotary_dim": 4}),
    "gpt_neo": Client("GPTNeoForCausalLM", "decoder", CAUSAL, SIZES | NEO),
    "llama": Client("LlamaForCausalLM", "decoder", CAUSAL, SIZES),
    "mistral": Client("MistralForCausalLM", "decoder", CAUSAL, SIZES | MISTRAL),
    "opt": Client("OPTForCausalLM", "decoder", CAUSAL, SIZES | OPT),
    "pegasus": Client("PegasusForConditionalGeneration", "seq2seq", TEXT, PAIR),
    "t5": Client("T5ForConditionalGeneration", "t5", TEXT, T5),
    "t5_encoder": Client("T5EncoderModel", "encoder", TEXT, T5),
    "vit": Client("ViTForImageClassification", "image", PIXELS, PICTURE),
}


class Called(nn.Module):
    """A client's module, and how it is called with arrays."""

    inner: nn.Module
    call: Callable[..., jax.Array]

    def __call__(self, *inputs):
        return self.call(self.inner, *inputs)


def network(client: Client):
    """With matrices of such a size that attention is not even, twelve times the usual initial one."""
    transformers = pytest.importorskip("transformers")
    kind = getattr(transformers, f"Flax{client.model}")
    model = kind(kind.config_class(**client.options), _do_init=False)
    random = np.random.default_rng(1)

    def drawn(path, like):
        z = random.normal(size=like.shape)
        gain = path[-1].key in ("scale", "weight") and like.ndim == 1
        z = 1 + 0.1 * z if gain else (0.24 if like.ndim > 1 else 0.1) * z
        return jnp.asarray(z, jnp.float32)

    params = jax.tree_util.tree_map_with_path(drawn, model.params_shape_tree)
    return Called(model.module, CALLS[client.call]).bind({"params": {"inner": params}})


@pytest.mark.parametrize("name", CLIENTS)
def test_a_client_called_plainly(name):
    """No noise gives the network, noise the spread of sampled networks."""
    client = CLIENTS[name]
    net = network(client)
    model = mj.Bayesian(net, relative_scale=0.1)
    if client.refused is not None:
        assert_refused(model, client.inputs, client.refused)
        return
    figures = beside_sampled(model, net, client.inputs, 600)
    assert figures.off < 1e-5
    assert figures.error < 0.12
