"""What is wrong is said before anything is read or written."""

from __future__ import annotations

import collections
import datetime
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.core import FrozenDict
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import manymesh as mm
from flax import nnx
from manymesh.errors import ArgumentError, CheckpointError, CheckpointNotFoundError


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    directory = tmp_path_factory.mktemp("run")
    state = {
        "params": {"front": {"kernel": jnp.ones((32, 32)), "bias": jnp.ones(2)}, "back": {"kernel": jnp.ones((2, 2))}},
        "layers": {"w": jnp.ones((3, 2))},
        "key": jax.random.key(0),
        "step": 4,
    }
    with mm.checkpoint.Manager(directory) as manager:
        manager.save(10, state)
        manager.save(20, state)
    return directory


OF_FIVE = Mesh(np.array(jax.devices()[:5]), ("x",))


def params(**changes):
    return {"params": {"front": {"kernel": jnp.ones((32, 32)), "bias": jnp.ones(2)} | changes}}


LIKE = [
    (
        params(kernl=jnp.ones(3)),
        r"20 does not fit like=; nothing was read:\n"
        r"  params/front/kernl is not in the checkpoint; did you mean params/front/kernel",
    ),
    ({"zzz": jnp.ones(3)}, r"zzz is not in the checkpoint; it holds key, layers/w, params/back/kernel, params/front/bias, params/front/kernel, step\nsee docs"),
    (
        params(bias=jnp.ones(3)),
        r"params/front/bias was saved with shape \(2,\), but like= has shape \(3,\)",
    ),
    (
        params(bias=jnp.ones(2, jnp.bfloat16)),
        r"params/front/bias was saved as float32, but like= has bfloat16; cast=True converts it",
    ),
    ({"key": jnp.zeros(2, jnp.uint32)}, r"key was saved with shape \(\), but like= has shape \(2,\)"),
    ({"key": jax.random.key(0, impl="rbg")}, r"key was saved as key<fry>, but like= has key<rbg>; random keys and numbers"),
    ({"step": jax.random.key(0)}, r"step was saved as int64, but like= has key<fry>; random keys and numbers are not"),
    ({"layer_3": {"w": jnp.ones(2)}}, r"layer_3/w is layer 3, but the stack was saved with shape \(3, 2\)"),
    (
        params(kernel=jax.ShapeDtypeStruct((32, 32), np.float32, sharding=NamedSharding(OF_FIVE, P(None, "x")))),
        r"params/front/kernel of shape \(32, 32\) is not divided by the sharding in like=, .*'x'.* over a mesh of x=5",
    ),
    (
        params(bias=jax.ShapeDtypeStruct((2,), np.float32, sharding=NamedSharding(OF_FIVE.abstract_mesh, P()))),
        r"params/front/bias has a sharding on an abstract mesh in like=, .* with a mesh of devices",
    ),
    (params(bias=NamedSharding(OF_FIVE, P())), r"params/front/bias was saved as arrays, but like= has NamedSharding .*ShapeDtypeStruct"),
    ({"params": NamedSharding(OF_FIVE, P())}, r"params was saved as arrays, but like= has NamedSharding"),
    (lambda: params(), r"the tree itself was saved as arrays, but like= has function"),
    (params(bias=jnp.float32), r"params/front/bias was saved as arrays, but like= has .*'jax.numpy.float32'"),
    (
        params(bias=jnp.ones(3), kernel=jnp.ones(1), k1=1, k2=2, k3=3, k4=4),
        r"(\n  .*){5}\n  and 1 more\nsee docs",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("like", "words"), LIKE, ids=range(len(LIKE)))
def test_what_does_not_fit(like, words, saved) -> None:
    with pytest.raises(CheckpointError, match=words):
        mm.checkpoint.Manager(saved).restore(like=like, stacked={"layers": "layer_{}"})


def test_what_modules_of_nnx_share_is_not_torn_apart(tmp_path) -> None:
    """A whole module comes back if no variable in it is tied; where one is, its state does."""
    model = nnx.Sequential(nnx.Linear(2, 2, rngs=nnx.Rngs(0)), nnx.Linear(2, 2, rngs=nnx.Rngs(1)))
    mm.checkpoint.save(tmp_path / "untied", model)
    assert mm.checkpoint.restore(tmp_path / "untied", model).layers[0].kernel.shape == (2, 2)
    model.layers[1].kernel = model.layers[0].kernel
    mm.checkpoint.save(tmp_path / "tied", nnx.state(model))
    with pytest.raises(CheckpointError, match=r"like.*\[0\].kernel and like.*\[1\].kernel are one variable"):
        mm.checkpoint.restore(tmp_path / "tied", model)
    nnx.update(model, mm.checkpoint.restore(tmp_path / "tied", like=nnx.state(model)))
    assert model.layers[1].kernel is model.layers[0].kernel


def test_what_would_lose_a_part(tmp_path) -> None:
    with pytest.raises(CheckpointError, match="x is a masked array: save its data and its mask"):
        mm.checkpoint.save(tmp_path / "masked", {"x": np.ma.masked_array(np.arange(3.0), [True, False, False])})
    with pytest.raises(CheckpointError, match="two keys of a dictionary in it are '1' as text"):
        mm.checkpoint.save(tmp_path / "keys", {"x": np.ones(2)}, metadata={"seen": {1: 2, "1": 3}})
    assert not list(tmp_path.iterdir())


def test_a_stack_has_all_layers_that_were_saved(tmp_path) -> None:
    """A smaller one is another model, as an array of another shape is; layers alone may be asked for."""
    mm.checkpoint.save(tmp_path / "c", {f"layer_{k}": {"w": jnp.full(2, k)} for k in range(3)})
    stacked = {"layers": "layer_{}"}
    words = r"layers/w stacks 2 layers, but the checkpoint has another one, layer_2/w; like= has to stack all"
    with pytest.raises(CheckpointError, match=words):
        mm.checkpoint.restore(tmp_path / "c", {"layers": {"w": jnp.ones((2, 2), int)}}, stacked=stacked)
    found = mm.checkpoint.restore(tmp_path / "c", {"layer_1": {"w": jnp.ones(2, int)}}, stacked=stacked)
    assert found["layer_1"]["w"].tolist() == [1, 1]


def test_one_key_is_no_stack_of_keys(tmp_path) -> None:
    mm.checkpoint.save(tmp_path / "c", {"layers": {"rng": jax.random.key(0)}})
    with pytest.raises(CheckpointError, match=r"layer_1/rng is layer 1, but the stack was saved with shape \(\)"):
        mm.checkpoint.restore(tmp_path / "c", {"layer_1": {"rng": jax.random.key(0)}}, stacked={"layers": "layer_{}"})


def test_where_there_is_no_checkpoint(saved, tmp_path) -> None:
    """It says what is there."""
    (tmp_path / "file").write_text("x")
    (tmp_path / "30.orbax-checkpoint-tmp").mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "model.bin").write_text("x")
    (tmp_path / "empty").mkdir()
    for path, words in [
        (saved / "15", r"15: there is no checkpoint; .* holds 10, 20\nsee docs"),
        (saved, r"holds the checkpoints of 2 steps: restore .*20, or ask Manager\("),
        (tmp_path / "no" / "where", r"there is no checkpoint, and no directory .*no either"),
        (tmp_path / "file", r"is a file; a checkpoint is a directory with a file _METADATA"),
        (
            tmp_path / "30",
            r"30: the checkpoint was not finished: saving was cut off, or goes on; restore an earlier one",
        ),
        (tmp_path / "30.orbax-checkpoint-tmp", r"is a checkpoint that was not finished"),
        (tmp_path / "other", r"other is no checkpoint: expected is a file _METADATA, there are model\.bin\nsee docs"),
        (tmp_path / "empty", r"empty is no checkpoint: expected is a file _METADATA, it is empty\nsee docs"),
    ]:
        with pytest.raises(CheckpointNotFoundError, match=words):
            mm.checkpoint.restore(path, {"w": jnp.ones(2)})
        with pytest.raises(FileNotFoundError):
            mm.checkpoint.metadata(path)
    with pytest.raises(CheckpointNotFoundError, match=r"holds no finished checkpoint; latest_step\(\) is None"):
        mm.checkpoint.Manager(tmp_path).restore(like={"w": jnp.ones(2)})


def test_what_is_damaged(saved, tmp_path) -> None:
    """Files that were cut off, a lost database, a broken list."""
    for name in ("short", "lost", "broken"):
        shutil.copytree(saved / "20", tmp_path / name)
    for file in (tmp_path / "short" / "default" / "d").iterdir():
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    shutil.rmtree(tmp_path / "lost" / "default" / "d")
    (tmp_path / "broken" / "default" / "_METADATA").write_text("{")
    shutil.copytree(saved / "20", tmp_path / "manifest")
    (tmp_path / "manifest" / "default" / "manifest.ocdbt").write_bytes(b"x")
    for name, words in [
        ("short", r"cannot be read: (?s:.*); restore another checkpoint"),
        ("lost", r"lost cannot be read: NOT_FOUND(?s:.*)restore another checkpoint"),
        ("broken", r"_METADATA cannot be read: .*restore another checkpoint"),
        ("manifest", r"manifest cannot be read: DATA_LOSS.*manifest.ocdbt.*; restore another checkpoint"),
    ]:
        with pytest.raises(CheckpointError, match=words) as raised:
            mm.checkpoint.restore(tmp_path / name, params())
        assert "tensorstore_spec" not in str(raised.value)
    (tmp_path / "lost" / "default" / "manifest.ocdbt").unlink()
    with pytest.raises(CheckpointError, match=r"lists 6 arrays, but their database \(manifest.ocdbt\) is not there"):
        mm.checkpoint.restore(tmp_path / "lost", params())


def deleted():
    x = jnp.ones((2, 2))
    x.delete()
    return x


SAVE = [
    (lambda: {"w": deleted()}, {}, r"w of shape \(2, 2\) has been deleted: it was donated to a step; save what the step"),
    (lambda: {"w": np.array(["a"])}, {}, r"w is ndarray array\(.* of dtype <U1, which is no array of numbers; keep it in met"),
    (lambda: {"n": 2**70}, {}, r"n is int 1180591620717411303424 of dtype object, which is no array of numbers"),
    (lambda: {"w": np.ones(2, np.longdouble)}, {}, r"w is ndarray of dtype float128, which a checkpoint does not hold; save an array of at m"),
    (lambda: {"w": np.longdouble(1)}, {}, r"w is longdouble of dtype float128, which a checkpoint does not hold"),
    (lambda: {"w": np.zeros(2, [("a", "i4"), ("b", "f4")])}, {}, r"w is ndarray of dtype \[\('a', '<i4'\), \('b', '<f4'\)\], which a check"),
    (lambda: {"w": np.zeros(2, "V1")}, {}, r"w is ndarray of dtype \|V1, which a checkpoint does not hold"),
    (lambda: {"w": jax.ShapeDtypeStruct((2,), jnp.float32)}, {}, r"w is a description of an array .*: there is nothing to save"),
    (lambda: {"a.b": jnp.ones(1), "a": {"b": jnp.ones(1)}}, {}, r"leaves a/b and a.b have the same name 'a.b' in a checkpoint"),
    (lambda: {}, {"metadata": {"x": [0, jnp.ones(1)]}}, r"metadata= of .*: expected is what JSON can say; metadata\['x'\]\[1\] is ArrayImpl: write its .tol"),
    (lambda: {}, {"metadata": {"loss": jnp.bfloat16(1)}}, r"metadata\['loss'\] is ArrayImpl: write float\(...\) around it\nsee docs"),
    (lambda: {}, {"metadata": {"n": np.int32(1)}}, r"metadata\['n'\] is int32: write int\(...\) around it\nsee docs"),
    (lambda: {}, {"metadata": pathlib.Path("x")}, r"; metadata is PosixPath: Object of type PosixPath is not JSON serializable"),
    (lambda: {}, {"metadata": {(1, 2): 3}}, r"; it is dict: keys must be str, int"),
]  # fmt: skip


# What a checkpoint would lose, in containers of all kinds.
Named = collections.namedtuple("Named", "w tag")
LOST = [
    (lambda: {"w": jnp.ones(1), "tag": "run-7"}, r"\n  tag is str 'run-7', which is no array: keep it in metadata=, as anything"),
    (lambda: Named(jnp.ones(1), "run-7"), r"\n  tag is str 'run-7', which is no array"),
    (lambda: ({}, [jnp.ones(1), b"x"]), r"\n  1/1 is bytes b'x', which is no array"),
    (lambda: FrozenDict(a={"tag": "x"}), r"\n  a/tag is str 'x', which is no array"),
    (lambda: {"rng": np.random.default_rng(0)}, r"rng is numpy.random.*Generator, which is no array: keep its bit_generator.state in"),
    (lambda: {"data": {"path": pathlib.PurePosixPath("/x")}}, r"data/path is pathlib.*PurePosixPath\('/x'\), which is no array"),
    (lambda: {"at": datetime.date(2026, 1, 2)}, r"at is datetime.date datetime.date\(2026, 1, 2\), which is no array"),
    (lambda: {f"tag{i}": "x" for i in range(7)}, r"would lose tag0 and 6 more:(\n  .*){5}\n  and 2 more\nsee docs"),
]  # fmt: skip


@pytest.mark.parametrize(("make", "words"), LOST, ids=range(len(LOST)))
def test_what_a_checkpoint_would_lose(make, words, saved, tmp_path) -> None:
    """It is named, by `save` and by `restore`, and nothing is written."""
    with pytest.raises(CheckpointError, match=words):
        mm.checkpoint.save(tmp_path / "state", make())
    with mm.checkpoint.Manager(tmp_path / "run") as manager, pytest.raises(CheckpointError, match=words):
        manager.save(1, make())
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(
        CheckpointError,
        match=words.replace("would lose tag0 and 6 more", "nothing was read").replace("and 2", r"and \d"),
    ):
        mm.checkpoint.restore(saved / "10", make())


@pytest.mark.parametrize(("make", "options", "words"), SAVE, ids=range(len(SAVE)))
def test_what_cannot_be_saved(make, options, words, tmp_path) -> None:
    with pytest.raises(CheckpointError, match=words):
        mm.checkpoint.save(tmp_path / "state", make(), **options)
    assert list(tmp_path.iterdir()) == []


def test_mistakes_in_calls(saved, tmp_path) -> None:
    restore = mm.checkpoint.restore
    with pytest.raises(CheckpointError, match=r"10 exists already: remove it, or save under another name"):
        mm.checkpoint.save(saved / "10", {})
    with pytest.raises(CheckpointError, match=r"10 exists already: manager\.delete\(10\) removes it"):
        mm.checkpoint.Manager(saved).save(10, {})
    with pytest.raises(CheckpointNotFoundError, match=r"15: there is no checkpoint; all_steps\(\) lists what there is"):
        mm.checkpoint.Manager(saved).delete(15)
    with pytest.raises(CheckpointError, match=r"gs://bucket/x: a checkpoint becomes current by a rename, which object"):
        mm.checkpoint.save("gs://bucket/x", {})
    with pytest.raises(CheckpointError, match=r"is a tracer: save outside"):
        jax.jit(lambda x: mm.checkpoint.save(tmp_path / "x", {"w": x}))(1.0)
    with pytest.raises(ArgumentError, match=r"expected is the path of a directory, found dict"):
        mm.checkpoint.save({}, "path")
    with pytest.raises(
        ArgumentError, match=r"stacked='layers': expected is a dictionary, as \{'layers': 'layer_\{\}'\}"
    ):
        restore(saved / "10", {}, stacked="layers")
    assert restore(os.fsencode(saved / "10"), {"step": 0}) == {"step": 4}
    for stacked in ({"layers": "layer"}, {"layers": "{}/{}"}, {"{}": "layer_{}"}, {"layers": 3}):
        with pytest.raises(
            ArgumentError, match=r"expected is the name of stacked layers, and that of a single one with \{\}"
        ):
            restore(saved / "10", {}, stacked=stacked)
    for options in ({"max_to_keep": 0}, {"save_interval_steps": 2.5}):
        with pytest.raises(ArgumentError, match=rf"Manager\({next(iter(options))}=.*\): expected is a number from 1"):
            mm.checkpoint.Manager(tmp_path, **options)
    for step, shown in ((-1, "-1"), ("3", "'3'"), (True, "True"), (np.int64(-1), "-1"), (jnp.int32(-1), "-1")):
        with pytest.raises(ArgumentError, match=f"^step={shown}: expected is a number from 0"):
            mm.checkpoint.Manager(tmp_path).save(step, {})
    for step in ({"w": jnp.ones((30, 30))}, None, jnp.ones(()), np.ones(2, int)):
        words = r"^save\(step, state\): expected is a number from 0, which comes first; found \w+\nsee docs"
        with pytest.raises(ArgumentError, match=words):
            mm.checkpoint.Manager(tmp_path).save(step, 4)
    with pytest.raises(
        ArgumentError, match=r"^restore\(step, like=state\): expected is a number from 0, which comes fi"
    ):
        mm.checkpoint.Manager(saved).restore({"w": 1})
    with pytest.raises(ArgumentError, match=r"^delete\(step\): expected is a number from 0, .* found NoneType"):
        mm.checkpoint.Manager(saved).delete(None)
    step = mm.jit(mm.task(lambda x: x + 1, "only", devices=[0])).lower(1.0)
    with pytest.raises(ArgumentError, match=r"argument_of\(\.\.\., 'state'\): the step has the arguments 0\nsee docs"):
        mm.checkpoint.argument_of(step, "state")
    with pytest.raises(ArgumentError, match=r"argument_of takes what step.lower\(...\) or .* returned, found dict"):
        mm.checkpoint.argument_of({})


def test_a_directory_that_is_none(tmp_path) -> None:
    """A file is refused when the manager is made, and by what saves without one."""
    (tmp_path / "file").write_text("x")
    for directory in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(CheckpointError, match=r"file is a file; expected is the name of a directory"):
            mm.checkpoint.Manager(directory)
    with pytest.raises(CheckpointError, match=r"file/run: nothing was saved: .*Not a directory"):
        mm.checkpoint.save(tmp_path / "file" / "run", {})


def test_a_directory_that_nobody_may_write_to(saved, tmp_path, monkeypatch) -> None:
    """One can restore from it; the first call of `save` says what is wrong, due or not."""

    def refuse(*args, **kwargs):
        raise PermissionError("read only")

    with monkeypatch.context() as patch:
        patch.setattr(tempfile, "TemporaryFile", refuse)
        patch.setattr(pathlib.Path, "mkdir", refuse)
        for directory in (saved, tmp_path / "new"):
            manager = mm.checkpoint.Manager(directory, save_interval_steps=1000, asynchronous=False)
            assert manager.latest_step() == (20 if directory is saved else None)
            with pytest.raises(CheckpointError, match=r"cannot be written to: read only"):
                manager.save(1, {})
            with pytest.raises(CheckpointError, match=r"2000: nothing was saved: read only"):
                manager.save(2000, {})
        with pytest.raises(CheckpointError, match=r"state: nothing was saved: read only"):
            mm.checkpoint.save(tmp_path / "state", {})
    assert list(tmp_path.iterdir()) == []


def test_what_nobody_may_look_into(saved, monkeypatch) -> None:
    manager = mm.checkpoint.Manager(saved)

    def refuse(*args):
        raise PermissionError("not yours")

    monkeypatch.setattr(pathlib.Path, "is_dir", refuse)
    for ask in (manager.latest_step, manager.restore, lambda: mm.checkpoint.metadata(saved / "10")):
        with pytest.raises(CheckpointError, match=r"cannot be read: not yours"):
            ask()


def test_steps_that_have_other_names(saved, tmp_path) -> None:
    """Those of Orbax may; a manager would take them for nothing, and begin anew. What else is there does not matter."""
    for name in ("ckpt_5", "000005", "step=5"):
        shutil.copytree(saved / "20", tmp_path / name / name)
        words = rf"not their numbers: {name}; (?s:.*)Call the directories 5 (?s:.*)restore\('.*{name}', like\)"
        with pytest.raises(CheckpointError, match=words):
            mm.checkpoint.Manager(tmp_path / name)
        assert mm.checkpoint.restore(tmp_path / name / name)["step"] == 4
    mm.checkpoint.save(tmp_path / "run" / "best_5", {"w": 1})
    mm.checkpoint.save(tmp_path / "run" / "phase_2" / "7", {"w": 1})
    shutil.copytree(saved / "20", tmp_path / "run" / "20.orbax-checkpoint-tmp-17")
    assert mm.checkpoint.Manager(tmp_path / "run").all_steps() == []


def test_without_tensorstore() -> None:
    code = "import sys; sys.modules['tensorstore'] = None; import manymesh as mm; mm.checkpoint"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    words = "ImportError: manymesh.checkpoint needs TensorStore: pip install 'manymesh[checkpoint]'"
    assert done.stderr.splitlines()[-1] == words


def test_items_that_another_program_has_named(tmp_path):
    """Orbax saves a step as items, of names that are up to the user: one is what is meant, of several one has to be said."""
    state = {"w": jnp.arange(4.0)}
    mm.checkpoint.save(tmp_path / "alone", state)
    (tmp_path / "step").mkdir()
    shutil.copytree(tmp_path / "alone", tmp_path / "step" / "params")
    np.testing.assert_array_equal(mm.checkpoint.restore(tmp_path / "step", state)["w"], state["w"])
    assert mm.checkpoint.metadata(tmp_path / "step") is None
    shutil.copytree(tmp_path / "alone", tmp_path / "step" / "opt")
    with pytest.raises(CheckpointError, match="step holds 2 items, opt, params: say which, such as .*step/opt"):
        mm.checkpoint.restore(tmp_path / "step", state)


def test_a_name_of_what_is_not_finished(tmp_path):
    with pytest.raises(CheckpointError, match="those of checkpoints that are not finished; save under another name"):
        mm.checkpoint.save(tmp_path / "a.orbax-checkpoint-tmp-1", {"w": jnp.ones(2)})
    assert not list(tmp_path.iterdir())
