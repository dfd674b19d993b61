"""Small case files with a truth sampled by NumPy alone."""

import numpy as np


def mlp_arrays(num_samples=4000):
    """A case of 4 -> 5 -> 3 units; the truth by plain sampling."""
    rng = np.random.default_rng(0)
    arrays = {"X": rng.normal(size=(3, 4))}
    for i, (out, width) in enumerate(((5, 4), (3, 5))):
        arrays[f"W{i}"] = rng.normal(size=(out, width)) / width**0.5
        arrays[f"b{i}"] = 0.1 * rng.normal(size=out)
        arrays[f"Ws{i}"] = np.full((out, width), 0.1)
        arrays[f"bs{i}"] = np.full(out, 0.1 * i)  # the first bias is certain
    x = np.broadcast_to(arrays["X"][:2], (num_samples, 2, 4))
    for i in range(2):
        kernel, bias = (
            arrays[mean] + arrays[sd] * rng.normal(size=(num_samples, *arrays[mean].shape))
            for mean, sd in ((f"W{i}", f"Ws{i}"), (f"b{i}", f"bs{i}"))
        )
        x = np.einsum("noi,nbi->nbo", kernel, x) + bias[:, None, :]
        x = np.maximum(x, 0) if i == 0 else x
    arrays["mc_mean"], arrays["mc_std"] = x.mean(axis=0), x.std(axis=0)
    return {name: value.astype(np.float32) for name, value in arrays.items()}


def block_arrays(heads=2, tokens=3, width=4, hidden=6, classes=3):
    """Shapes of a one-block case with a head; its truth is made up."""
    rng = np.random.default_rng(1)
    sizes = {"f1": (hidden, width), "f2": (width, hidden)}
    arrays = {"X": rng.normal(size=(2, tokens, width)), "heads": np.array(heads)}
    for name in ("q", "k", "v", "o", "f1", "f2"):
        out, into = sizes.get(name, (width, width))
        arrays[f"L0_W{name}"] = rng.normal(size=(out, into)) / into**0.5
        arrays[f"L0_b{name}"] = np.zeros(out)
    for name in ("ln1", "ln2"):
        arrays[f"L0_{name}_g"], arrays[f"L0_{name}_b"] = np.ones(width), np.zeros(width)
    for name in [name for name in arrays if name.startswith("L0")]:
        arrays[f"{name}_s"] = np.full(arrays[name].shape, 0.05)
    arrays["head_W"], arrays["head_b"] = rng.normal(size=(classes, width)), np.zeros(classes)
    arrays["mc_mean"], arrays["mc_std"] = arrays["X"], np.ones(arrays["X"].shape)
    arrays["logit_mean"], arrays["logit_std"] = np.zeros((2, classes)), np.ones((2, classes))
    return {
        name: value if name == "heads" else value.astype(np.float32)
        for name, value in arrays.items()
    }
