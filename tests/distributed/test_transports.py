"""One contract for every transport between processes: what it carries, in which layouts, and how far it gets ahead."""

import numpy as np
import programs
import pytest
from pool import Pool
from test_pool import GROUPS

import manymesh as mm
from manymesh._distributed._transports import NAMES, VARIABLE, asked_for, different_transports, of_backend
from manymesh._distributed._world import WINDOW

pytestmark = pytest.mark.once

every_transport = pytest.mark.parametrize("transport", NAMES)
OTHERS = [name for name in NAMES if name != "pull"]  # the other tests of this folder pull
others = pytest.mark.parametrize("transport", OTHERS)

WHOLE, ROWS, COLUMNS = (), ("x",), (None, "x")
DTYPES = ("float32", "bool", "int4", "uint4", "int8", "float8_e4m3fn", "bfloat16", "float16", "complex64", "key")


@pytest.fixture(scope="module")
def pool():
    """Processes of their own: what runs here uses several transports beside each other, which no program does."""
    made = Pool()
    yield made
    made.close()


@every_transport
def test_every_dtype_crosses(pool, transport):
    """Scalars, empty arrays and others, from one process to the other and back."""
    places = [((0,), WHOLE), ((4,), WHOLE)]
    shapes = [(), (0,), (2, 4)]
    answers = pool.call("programs.under", transport, "crossing", DTYPES, shapes, places, places[::-1])
    assert answers == [[], []]


@every_transport
def test_every_layout_crosses(pool, transport):
    """Whole and in rows or columns, onto more, fewer, several and other devices, of one process or both."""
    sources = [((0, 1), ROWS), ((0, 1), ROWS), ((0, 4), ROWS), ((0, 1, 4, 5), COLUMNS), ((0,), WHOLE), ((5, 4), ROWS)]
    targets = [
        ((4, 5), ROWS),
        ((5, 0), ROWS),
        ((5, 1), ROWS),
        ((6, 7, 2, 3), COLUMNS),
        ((1, 4, 5), WHOLE),
        ((0, 1), ROWS),
    ]
    answers = pool.call("programs.under", transport, "crossing", ("float32", "key"), [(8, 4)], sources, targets)
    assert answers == [[], []]


@every_transport
def test_every_size_crosses(pool, transport):
    """1 KB, 1 MB and 64 MB, there and back."""
    places = [((1,), WHOLE), ((6,), WHOLE)]
    shapes = [(nbytes // 8,) for nbytes in (1 << 10, 1 << 20, 64 << 20)]
    assert pool.call("programs.under", transport, "crossing", ("complex64",), shapes, places, places[::-1]) == [[], []]


@every_transport
def test_a_fast_sender_waits(pool, transport):
    """While the other process does not come to take anything, no more is under way to it than a window."""
    (ahead, arrived), (_, arrived_there) = pool.call("programs.under", transport, "sent_ahead", 3 * WINDOW)
    assert ahead <= WINDOW
    assert arrived == []
    assert arrived_there == list(range(3 * WINDOW))


@every_transport
def test_what_was_sent_can_be_donated(pool, transport):
    """A result of a call that is still on its way when the next call takes its buffer arrives as it was."""
    for seen in pool.call("programs.under", transport, "sent_and_donated", 30):
        assert seen == [[k + 1, k + 1] for k in range(30)]


@every_transport
def test_what_was_sent_can_be_donated_under_another_name(pool, transport):
    """A copy on a submesh that shares devices with the one that sends may be the same buffer."""
    for seen in pool.call("programs.under", transport, "sent_and_donated_beside", 30):
        assert seen == [[k + 1, k + 1] for k in range(30)]


@others
def test_steps_run(pool, transport):
    """Training on submeshes that span processes, fetching, ghosts, and arguments and results that move."""
    expected = programs.training(GROUPS["spanning"], 2, "1f1b", 2)
    for losses, *_ in pool.call("programs.under", transport, "training", GROUPS["spanning"], 2, "1f1b", 2):
        np.testing.assert_allclose(losses, expected[0], rtol=1e-6)
    for results, value in pool.call("programs.under", transport, "arguments"):
        for result in results.values():
            np.testing.assert_allclose(result, value, rtol=1e-5, atol=1e-6)
    for there, (y, x) in pool.call("programs.under", transport, "moved_results"):
        assert there and (y.tolist(), x.tolist()) == ([1, 2, 3, 4], [0, 1, 2, 3])
    (everywhere, again, some), (_, _, some_1) = pool.call("programs.under", transport, "fetching")
    np.testing.assert_equal(everywhere, again)
    assert everywhere["two"].tolist() == [[0, 1, 2], [3, 4, 5]] and everywhere["both"][3, 3] == 15
    assert some == {"one": None, "two": None} and some_1["one"].tolist() == [*range(8)]


@others
def test_laws_hold_on_generated_programs(pool, transport, shared, request):
    """The laws of one process hold in two; a few programs, of which `test_pool.py` has more."""
    for number in (6,) if request.config.getoption("--hypothesis-profile") == "brief" else (1, 6):
        pool.call("programs.under", transport, "generated", number, shared)


@pytest.fixture(scope="module")
def trained_by_three():
    """What three processes say of `programs.three`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, "device_put")  # which alone has to be prepared
        return mm.distributed.launch(programs.three, 3, args=(OTHERS,), timeout=400)


@pytest.mark.xdist_group("three")  # which are started once
@others
def test_processes_without_a_part(trained_by_three, transport):
    """Of three processes one has no part in what crosses between the other two, and comes to the same losses."""
    expected = programs.training([(0,), (1,), (2,)], 2, "1f1b", 2)
    for asked, answer in trained_by_three:
        assert asked == "device_put"
        np.testing.assert_allclose(answer[transport], expected[0], rtol=1e-6)


# --- which one ------------------------------------------------------------------------------------------------------


def test_all_ask_for_the_same_one():
    """Else it is said which differ."""
    assert different_transports(["pull", "pull"]) == different_transports([None, None]) == ""
    assert different_transports(["ppermute", "ppermute", None]) == (
        "the processes ask for different transports: process 0 for 'ppermute', process 2 for that of its backend; give all "
        "of them the same transport= and MANYMESH_TRANSPORT"
    )


def test_what_is_asked_for(monkeypatch):
    """The argument goes before the variable; without either the backend decides, and this one has none of its own."""
    monkeypatch.setenv(VARIABLE, "ppermute")
    assert (asked_for("device_put"), asked_for(None)) == ("device_put", "ppermute")
    monkeypatch.setenv(VARIABLE, "")
    assert (asked_for(None), of_backend()) == (None, "pull")


def test_a_transport_that_there_is_not(monkeypatch):
    """Refused before anything else, with the names that there are."""
    with pytest.raises(mm.errors.ProcessError, match=r"transport has to be one of 'pull', 'device_put', .*found 'mpi'"):
        mm.distributed.initialize(transport="mpi")
    monkeypatch.setenv(VARIABLE, "tcp")
    with pytest.raises(mm.errors.ProcessError, match=r"MANYMESH_TRANSPORT has to be one of .*found 'tcp'"):
        mm.distributed.initialize()
