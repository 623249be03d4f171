"""Submeshes of a mesh, and devices by their ids."""

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh

import manymesh as mm
from manymesh._topology import auto_mesh, resolve_devices

pytestmark = pytest.mark.once


@pytest.mark.parametrize("axis_type", list(AxisType)[:2])
@pytest.mark.parametrize("axis", ["stage", "data", "model"])
def test_submeshes_take_one_axis_away(axis, axis_type):
    """In order along the axis, disjoint, together the whole mesh, every axis Auto."""
    mesh = jax.make_mesh((2, 2, 2), ("stage", "data", "model"), axis_types=(axis_type,) * 3)
    parts = mm.submeshes(mesh, axis)
    rest = tuple(a for a in mesh.axis_names if a != axis)
    position = mesh.axis_names.index(axis)
    for k, part in enumerate(parts):
        assert part.axis_names == rest and set(part.axis_types) == {AxisType.Auto}
        np.testing.assert_array_equal(part.devices, np.take(mesh.devices, k, position))
    assert {d for p in parts for d in p.devices.flat} == set(mesh.devices.flat)


def test_submeshes_of_a_mesh_of_one_axis_keep_its_name():
    """A mesh needs at least one axis."""
    parts = mm.submeshes(Mesh(np.array(jax.devices()[:3]), ("stage",)), "stage")
    assert [(p.axis_names, p.devices.shape, p.devices[0].id) for p in parts] == [
        (("stage",), (1,), i) for i in range(3)
    ]


def test_the_submesh_of_an_axis_of_length_one():
    """The one part is the whole mesh without the axis."""
    (part,) = mm.submeshes(Mesh(np.array(jax.devices()[:2]).reshape(1, 2), ("stage", "data")), "stage")
    assert part == Mesh(np.array(jax.devices()[:2]), ("data",))


def test_an_auto_mesh_stays_itself():
    """Only other kinds are made anew, over the same devices."""
    mesh = Mesh(np.array(jax.devices()[:2]), ("x",))
    assert auto_mesh(mesh) is mesh
    explicit = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Explicit,))
    assert auto_mesh(explicit) == Mesh(explicit.devices, ("x",))


@pytest.mark.parametrize("given", [3, [3], np.array([[3]]), np.int64(3), (np.int32(3),)])
def test_devices_by_id(given):
    """Ids of any integer type; the shape is kept."""
    devices = resolve_devices(given)
    assert devices.shape == np.shape(given) and [d.id for d in devices.flat] == [3]


def test_devices_and_ids_mix():
    """Each is resolved on its own."""
    assert [d.id for d in resolve_devices([jax.devices()[2], 1])] == [2, 1]


@pytest.mark.parametrize("given", [-1, 8, True, 1.0, "0", None, [[0, 1], [2, 2]], []])
def test_what_is_no_device(given):
    """Ids out of range, other types, repetitions, nothing."""
    with pytest.raises(mm.errors.MeshError, match="device"):
        resolve_devices(given)


def test_an_axis_that_the_mesh_does_not_have():
    mesh = Mesh(np.array(jax.devices()[:2]), ("data",))
    with pytest.raises(mm.errors.MeshError, match=r"has axes \('data',\), none is called 'stage'; name the one"):
        mm.submeshes(mesh, "stage")
