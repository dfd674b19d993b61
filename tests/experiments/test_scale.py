"""Reading compiled programs, the export, and the options of the experiment on scaling."""

import dataclasses
import json

import jax
import numpy as np
import optax
import pytest

from experiments.__main__ import main
from experiments.command_line import PartError
from experiments.scale import devices, export, hlo, networks, processes, tpu, weak, work
from experiments.scale.layout import Layout
from experiments.scale.networks import PLAIN, SIZES, make_step
from experiments.scale.work import Chip, roofline

PROGRAM = """
HloModule step, is_scheduled=true

%sum (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %add = f32[] add(%a, %b)
}

%sliced (stack: f32[5,4,8], i: s32[]) -> f32[4,8] {
  %stack = f32[5,4,8]{2,1,0} parameter(0)
  %i = s32[] parameter(1)
  %slice = f32[1,4,8]{2,1,0} dynamic-slice(%stack, %i), dynamic_slice_sizes={1,4,8}
  ROOT %bitcast = f32[4,8]{1,0} bitcast(%slice)
}

%all-reduce-scatter.1 (input: f32[8,8]) -> f32[4,8] {
  %input = f32[8,8]{1,0} parameter(0)
  %reduced = f32[8,8]{1,0} all-reduce(%input), replica_groups=mesh['a'=4,'b'=2] {'b'}, to_apply=%sum
  ROOT %part = f32[4,8]{1,0} dynamic-slice(%reduced), dynamic_slice_sizes={4,8}
}

%body (state: (s32[], f32[5,4,8], f32[8,8])) -> (s32[], f32[5,4,8], f32[8,8]) {
  %state = (s32[], f32[5,4,8]{2,1,0}, f32[8,8]{1,0}) parameter(0)
  %n = s32[] get-tuple-element(%state), index=0
  %stack.1 = f32[5,4,8]{2,1,0} get-tuple-element(%state), index=1
  %x = f32[8,8]{1,0} get-tuple-element(%state), index=2
  %one = f32[4,8]{1,0} fusion(%stack.1, %n), kind=kLoop, calls=%sliced
  %whole = f32[8,8]{1,0} all-gather(%one), replica_groups=[4,2]<=[8], dimensions={0}
  %product = f32[8,8]{1,0:S(1)} dot(%x, %whole), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %scattered = f32[4,8]{1,0} fusion(%product), kind=kCustom, calls=%all-reduce-scatter.1
  ROOT %next = (s32[], f32[5,4,8]{2,1,0}, f32[8,8]{1,0}) tuple(%n, %stack.1, %product)
}

%condition (state.1: (s32[], f32[5,4,8], f32[8,8])) -> pred[] {
  %state.1 = (s32[], f32[5,4,8]{2,1,0}, f32[8,8]{1,0}) parameter(0)
  %five = s32[] constant(5)
  %n.1 = s32[] get-tuple-element(%state.1), index=0
  ROOT %less = pred[] compare(%n.1, %five), direction=LT
}

ENTRY %main (p: (s32[], f32[5,4,8], f32[8,8])) -> f32[8,8] {
  %p = (s32[], f32[5,4,8]{2,1,0}, f32[8,8]{1,0}) parameter(0)
  %loop = (s32[], f32[5,4,8]{2,1,0}, f32[8,8]{1,0}) while(%p), condition=%condition, body=%body
  %all = f32[8,8]{1,0} get-tuple-element(%loop), index=2
  ROOT %out = f32[8,8]{1,0} all-reduce(%all), replica_groups={{0,1,2,3},{4,5,6,7}}, to_apply=%sum
}
"""


pytestmark = pytest.mark.usefixtures("settings_of_a_user")


def test_loops_count_as_often_as_they_run():
    module = hlo.parse(PROGRAM)
    assert module.counts()["body"] == 5
    assert work.matrix_flops(module) == 5 * 2 * 8**3
    # A round reads and writes the slice (256 bytes), gathers it (128 + 256), multiplies into the chip's
    # own memory (2 x 256), and scatters from there (128); its condition takes 9.
    # At the end an all-reduce reads and writes 256.
    assert work.hbm_bytes(module) == 5 * (2 * 128 + 4 + 128 + 256 + 2 * 256 + 128 + 9) + 2 * 256
    with pytest.raises(ValueError, match="ENTRY"):
        hlo.parse("HloModule empty")


def test_collectives_by_kind():
    kinds = work.collectives(hlo.parse(PROGRAM), 8)
    assert kinds["all-gather"] == {"lines": 1, "runs": 5, "bytes": 5 * 128}
    assert kinds["reduce-scatter"] == {"lines": 1, "runs": 5, "bytes": 5 * 256 / 2}
    assert kinds["all-reduce"] == {"lines": 1, "runs": 1, "bytes": 2 * 256 * 3 / 4}


@pytest.mark.parametrize(
    ("groups", "size"),
    [
        ("replica_groups={{0,2},{1,3}}", 2),
        ("replica_groups=[2,4]<=[4,2]T(1,0)", 4),
        ("replica_groups=mesh['axis_0'=4,'axis_1'=1,'axis_2'=2] {'axis_0','axis_2'}", 8),
        ("replica_groups=mesh['axis_0'=4,'axis_1'=2], device_ids=([4,2]T(1,0)) {'axis_0'}", 4),
        ("replica_groups={}", 8),
    ],
)
def test_who_takes_part(groups, size):
    line = hlo.Instruction(
        "x", "all-reduce", (), (), (), f"%x = f32[] all-reduce(%y), {groups}, a=1"
    )
    assert work.group_size(line, 8) == size


@pytest.mark.parametrize(
    ("left", "right", "out", "labels", "window", "flops"),
    [
        ("32,196,256", "256,768,1", "32,196,768", "0bf_io0->0bf", "size=1", 2 * 32 * 196 * 256 * 768),
        # A product for each of three heads, (4, 5) by (5, 7): padding multiplies nothing.
        ("1,4,5", "3,7,5", "3,4,7", "0bf_0oi->0bf", "size=3 pad=2_2 rhs_reversal=1", 2 * 3 * 4 * 7 * 5),
    ],
)  # fmt: skip
def test_convolutions_that_are_products(left, right, out, labels, window, flops):
    module = hlo.parse(
        f"ENTRY %main (a: f32[{left}]) -> f32[{out}] {{\n"
        f"  %a = f32[{left}] parameter(0)\n  %b = f32[{right}] parameter(1)\n"
        f"  ROOT %c = f32[{out}] convolution(%a, %b), window={{{window}}}, dim_labels={labels}\n}}\n"
    )
    assert work.matrix_flops(module) == flops


def test_roofline_names_the_bound():
    record = {
        "flops": 8.0,
        "model_flops": 6.0,
        "hbm_bytes": 3.0,
        "collectives": {"all-gather": {"bytes": 4.0}},
        "memory": {"reserved": 5.0},
    }
    bound = roofline(record, Chip(flops=4.0, hbm=1.0, link=1.0, memory=4.0))
    assert bound["bound"] == "links"
    assert bound["mfu_overlapped"] == pytest.approx(1.5 / 4)
    assert bound["mfu_in_turn"] == pytest.approx(1.5 / 9)
    assert not bound["fits"]


def test_a_step_in_chunks_is_the_step(monkeypatch):
    monkeypatch.setattr(optax, "adam", optax.sgd)  # so that parameters show the gradient
    monkeypatch.setattr(networks, "LEARNING_RATE", 1.0)
    size = dataclasses.replace(SIZES["tiny"], num_blocks=1, per_row=4)
    keys = jax.random.split(jax.random.key(0), 3)

    def loss(size):
        step, (params, state) = make_step(size, PLAIN, Layout.one_device())
        params = jax.tree.map(lambda x: 0.1 * jax.random.normal(keys[0], x.shape, x.dtype), params)
        images = jax.random.normal(keys[1], size.batch(1)[0].shape)
        labels = jax.random.randint(keys[2], (4,), 0, size.num_classes)
        return jax.jit(step)((params, state), images, labels)

    whole = loss(dataclasses.replace(size, remat=False))
    parts = loss(dataclasses.replace(size, chunks=2))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5), parts, whole)


def test_an_exported_function_is_saved_and_loaded(tmp_path, capsys):
    record = export.run("Diagonal", tmp_path)
    assert record["platforms"] == ["cpu", "cuda", "tpu"]
    assert set(record["differences"]) == {"3", "8"}
    assert (tmp_path / export.FILE).stat().st_size == record["bytes"]
    assert "cuda" in capsys.readouterr().out


def test_without_the_package_that_saves(capsys, monkeypatch):
    monkeypatch.setattr(export, "can_save", lambda: False)
    assert main(["scale", "--part", "export"]) == 2
    assert "needs the package flatbuffers" in capsys.readouterr().err


def test_without_a_compiler_for_tpus(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(tpu, "installed", lambda: False)
    file = tmp_path / "scale.json"
    assert main(["scale", "--part", "tpu", "--json", str(file)]) == 0
    assert "skipped, for libtpu is not installed" in capsys.readouterr().out
    assert json.loads(file.read_text()) == {"tpu": [{"skipped": "libtpu is not installed"}]}


def test_what_a_tpu_record_must_not_say():
    record = {
        "network": "n",
        "structure": "Diagonal",
        "topology": "t",
        "fits": False,
        "over_plain": {"memory_reserved": 3.5, "memory_peak": 1.0},
    }
    assert len(tpu.faults(record)) == 2
    assert tpu.faults({**record, "failed": "why"}) == ["n Diagonal on t: why"]


def test_a_process_that_fails_says_why():
    assert processes.why("Traceback\n  x\njax.errors.JaxRuntimeError: out\nend") == (
        "jax.errors.JaxRuntimeError: out"
    )
    with pytest.raises(PartError, match="ZeroDivisionError: "):
        processes.fresh(["-c", "1 / 0"])
    with pytest.raises(PartError, match="no result"):
        processes.fresh(["-c", "import time; time.sleep(60)"], timeout=0.01)


def test_differences_are_relative_to_the_largest_entry():
    results = {
        layout: {"gradient 0": np.array([x, 2.0])} for layout, x in {"1x1": 0, "2x1": 0.1}.items()
    }
    (record,) = devices.differences("S", results)
    assert record["gradient"] == pytest.approx(0.05)
    assert record["loss"] == 0


def test_more_than_rounding_is_a_fault():
    same = dict.fromkeys(devices.WHAT, 0.0)
    rounding = {"structure": "S", "layout": devices.FLOAT64, **same, "gradient": 6e-6}
    near = {"structure": "S", "layout": "2x4", **same, "gradient": 1.2e-5}
    far = {"structure": "S", "layout": "4x1", **same, "gradient": 2e-5, "loss": 2e-5}
    assert not devices.faults([near, rounding])
    by_loss, by_gradient = devices.faults([far, near, rounding])
    assert "4x1: loss" in by_loss
    assert "4x1: gradient" in by_gradient


def test_a_share_that_grows_is_a_fault():
    record = {"structure": "S", "devices": 2, "flops_growth": 1.5, "memory_growth": 1.0}
    assert "flops" in weak.faults(record)[0]
    sent = [{"all-gather": {"bytes": 1.0}}, {"all-gather": {"bytes": 3.0}}]
    records = [
        {"structure": "S", "devices": 2 * (i + 1), "collectives": own} for i, own in enumerate(sent)
    ]
    assert weak.uneven("S", records)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--part", "nothing"], "--part: invalid choice: 'nothing'"),
        (["--network", "tiny"], "--network: invalid choice: 'tiny'"),
        (["--structure", "Dense"], "--structure: invalid choice: 'Dense'"),
    ],
)
def test_options(arguments, message, capsys):
    assert main(["scale", "--part", "tpu", *arguments]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_weak_scaling_of_a_tiny_network(capsys):
    records = weak.run(["Diagonal"], counts=(1, 2))
    assert [record["devices"] for record in records] == [1, 2]
    assert "one device's share" in capsys.readouterr().out
