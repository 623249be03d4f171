"""Descriptions of devices."""

import dataclasses

import jax
import pytest

from manymesh.errors import ArgumentError
from manymesh.inspect import Hardware

pytestmark = pytest.mark.once


@pytest.mark.parametrize("name", Hardware.ready())
def test_what_is_ready_is_within_reason(name):
    """Faster in low precision; memory that takes a millisecond to a tenth of a second to read once."""
    hardware = Hardware.ready()[name]
    assert hardware.flops_per_second("bfloat16") >= hardware.flops_per_second("float32") > 1e14
    assert 1e-3 < hardware.memory_bytes / hardware.memory_bandwidth < 0.1
    assert hardware.link_bandwidth < hardware.memory_bandwidth
    assert hardware.name.lower().split()[-1][:3] in (getattr(Hardware, name).__doc__ or "").lower()


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA B200", "B200"),
        ("TPU v5p", "TPU v5p"),
        ("TPU v6 lite", "TPU v6e"),
    ],
)
def test_a_device_is_known_by_its_kind(kind, name):
    """As JAX names them."""
    found = Hardware.of(type("Device", (), {"device_kind": kind})())
    assert found is not None and found.name == name
    assert Hardware.of(jax.devices()[0]) is None


def test_an_unknown_dtype_counts_as_float32():
    """And efficiency lowers rates alone."""
    hardware = Hardware.h100()
    assert hardware.flops_per_second("complex64") == hardware.peak_flops["float32"]
    half = hardware.scaled(0.5)
    assert half.flops_per_second("bfloat16") == hardware.flops_per_second("bfloat16") / 2
    assert dataclasses.replace(half, peak_flops=hardware.peak_flops) == hardware


def test_rates_are_positive_and_float32_is_there():
    """Otherwise times would be infinite, or a dtype without a rate."""
    with pytest.raises(ArgumentError, match="memory_bandwidth has to be a positive number, found 0"):
        Hardware("x", {"float32": 1.0}, 0, 1.0)
    with pytest.raises(ArgumentError, match=r"peak_flops\['float32'\] has to be a positive number, found -1"):
        Hardware("x", {"float32": -1.0}, 1.0, 1.0)
    with pytest.raises(ArgumentError, match="needs 'float32'"):
        Hardware("x", {"bfloat16": 1.0}, 1.0, 1.0)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"peak_flops": 1e12}, r"peak_flops has to be a mapping .*\{'float32': 1e12\}, found 1000000000000.0"),
        ({"peak_flops": {"float32": 1.0, "bf16": 1.0}}, "peak_flops has 'bf16', .*; 'bfloat16' is meant"),
        ({"peak_flops": {"tf32": 1.0}}, "peak_flops has 'tf32', .*; 'float32' is meant"),
        (
            {"peak_flops": {jax.numpy.float32: 1.0}},
            "peak_flops has .*, which is no name of a dtype; 'float32' is meant",
        ),
        ({"peak_flops": {"float32": 1.0, "xyz": 1.0}}, "peak_flops has 'xyz', .*; write one such as 'bfloat16'"),
        ({"peak_flops": {"float32": "1 TFLOP/s"}}, r"peak_flops\['float32'\] .* positive number, found '1 TFLOP/s'"),
        ({"memory_bandwidth": "3.35TB/s"}, "memory_bandwidth has to be a positive number, found '3.35TB/s'"),
        ({"link_bandwidth": float("nan")}, "link_bandwidth has to be a positive number, found nan"),
        ({"link_latency": -1.0}, "link_latency has to be a number of seconds, 0 or more, found -1.0"),
        ({"launch_overhead": None}, "launch_overhead has to be a number of seconds, 0 or more, found None"),
        ({"memory_bytes": -5}, "memory_bytes has to be a positive number, found -5"),
        ({"cores": 0}, "cores has to be a positive number, found 0"),
        ({"name": 100}, "name has to be a text, found 100"),
    ],
)
def test_every_field_is_checked(given, said):
    """With its name, what was found and what is expected."""
    fine = {"name": "x", "peak_flops": {"float32": 1.0}, "memory_bandwidth": 1.0, "link_bandwidth": 1.0}
    Hardware(**fine)
    with pytest.raises(ArgumentError, match="^Hardware: " + said):
        Hardware(**fine | given)


def test_this_machine_can_be_measured():
    """Rates that a computer may have; eight devices share its cores."""
    here = Hardware.measure(size=128)
    assert 1e7 < here.flops_per_second("float32") < 1e16
    assert 1e7 < here.memory_bandwidth < 1e14 and here.link_bandwidth > 1e6
    assert 0 < here.launch_overhead < 1 and 0 < here.link_latency < 1
    assert here.cores is not None and here.cores >= 1
