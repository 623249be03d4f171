"""The house rules that a parser can check, for every source file of the package.

Each rule is a function from source text to a list of complaints, so that the tests at the end of this file
can feed it a bad source and see it complain. Nothing here imports the package.
"""

from __future__ import annotations

import ast
import functools
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

pytestmark = [pytest.mark.once, pytest.mark.xdist_group("sources")]  # read once

SRC = Path(__file__).resolve().parents[1] / "src"

# A module imports only from layers above its own line, or from its own layer without a circle.
LAYERS = (
    "_types",
    "_publish",
    "_collector",
    "_shown",
    "_errors",
    "errors",
    "_compat",
    "_key",
    "_repeats",
    "_hardware",
    "_distributed",
    "distributed",
    "_config",
    "_findings",
    "_scope",
    "_stands_for",
    "_changed",
    "meta",
    "_topology",
    "_task",
    "_vmapped",
    "_implicit",
    "_notes",
    "_mark",
    "schedules",
    "_single",
    "_means",
    "_reductions",
    "_batch",
    "_draws",
    "_microbatch",
    "_program",
    "_passes",
    "_layout",
    "_plan",
    "_runtime",
    "_cost",
    "_report",
    "_measure",
    "_progress",
    "_calling",
    "_moved_again",
    "_stages",
    "_compiled",
    "_api",
    "_table",
    "_wrapping",
    "__init__",  # the face, `import manymesh`
    "_flax",
    "flax",
    "_nnx",
    "nnx",
    "_equinox",
    "equinox",
    "_checkpoint",
    "checkpoint",
    "_views",
    "inspect",
    "_cli",
    "__main__",
)

# The face names these for type checkers; when a program runs, they are imported on first use.
ADAPTERS = frozenset({"checkpoint", "equinox", "flax", "inspect", "nnx"})

# Packages besides the standard library that a layer may import at the head of a file.
THIRD_PARTY: Mapping[str, frozenset[str]] = {
    "schedules": frozenset(),
    **dict.fromkeys(
        ("_flax", "flax", "_nnx", "nnx"),
        frozenset({"jax", "numpy", "rich", "flax", "optax"}),
    ),
    "_views": frozenset({"jax", "numpy", "rich", "matplotlib"}),  # for types; tests/views imports it without
    **dict.fromkeys(("_equinox", "equinox"), frozenset({"jax", "numpy", "rich", "equinox"})),
    **dict.fromkeys(("_checkpoint", "checkpoint"), frozenset({"jax", "numpy", "tensorstore"})),
}
THIRD_PARTY_ELSEWHERE = frozenset({"jax", "numpy", "rich"})
# These layers may not import anything else inside functions either.
CLOSED_LAYERS = frozenset({"meta", "schedules"})
# What a layer may import of the package, where that is less than every layer above it.
NARROW: Mapping[str, frozenset[str]] = {
    "schedules": frozenset({"_errors", "schedules"}),
    # What a step costs is read off its plan: nothing that compiles or runs is in reach.
    "_cost": frozenset(
        {
            "_compat",
            "_types",
            "_cost",
            "_hardware",
            "_key",
            "_layout",
            "_passes",
            "_plan",
            "_program",
            "_shown",
            "_task",
        }
    ),
}

# Optional or slow to import: the only packages that a function may import.
LAZY = frozenset({"IPython", "flax", "optax", "equinox", "orbax", "rich", "matplotlib", "cloudpickle"})

# At most this share of the annotations of signatures is a bare `Any`; trees are a `PyTree`. The rooms keep to it as well.
TYPED = frozenset({"_program", "_passes", "_plan", "_runtime", "_layout", "meta"})
MAX_BARE_ANY = 0.1

MAX_FUNCTION_LINES = 89
MAX_FILE_LINES = 699


# --- reading ------------------------------------------------------------------------------------


parse = functools.cache(ast.parse)  # nobody changes a tree


@dataclass(frozen=True)
class Import:
    """One imported module: `from a import b` gives `a` with the name `b`, `import a.b` gives `a.b` without one."""

    line: int
    module: str
    name: str | None
    in_function: bool

    @property
    def root(self) -> str:
        return self.module.partition(".")[0]

    @property
    def path(self) -> str:
        return self.module if self.name is None else f"{self.module}.{self.name}"


def walk(tree: ast.AST, in_function: bool = False) -> Iterator[tuple[ast.AST, bool]]:
    """Every node below `tree`, with whether a function is around it."""
    for node in ast.iter_child_nodes(tree):
        yield node, in_function
        is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        yield from walk(node, in_function or is_function)


@functools.cache
def nodes(source: str) -> list[tuple[ast.AST, bool]]:
    """What `walk` finds below a source; every rule goes through it."""
    return list(walk(parse(source)))


def package_of(module: str) -> str:
    """The package that `from . import x` means in `module`; `a.__init__` names a package's own file."""
    return module.rpartition(".")[0]


@functools.cache
def imports(source: str, module: str) -> list[Import]:
    """All imports of a source with relative ones resolved, including those under `if TYPE_CHECKING`."""
    found = []
    for node, in_function in nodes(source):
        if isinstance(node, ast.Import):
            found += [Import(node.lineno, alias.name, None, in_function) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = package_of(module)
                for _ in range(node.level - 1):
                    package = package_of(package)
                base = f"{package}.{base}".rstrip(".")
            found += [Import(node.lineno, base, alias.name, in_function) for alias in node.names]
    return found


def layer_of(module: str) -> str:
    """`manymesh.meta._boxes` is in layer `meta`; the package itself is in layer `__init__`."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


def target_layer(imported: Import) -> str:
    """The layer an import reaches: `from manymesh import meta` reaches `meta`, `from manymesh import jit` the face."""
    if imported.module == "manymesh" and imported.name in LAYERS:
        return str(imported.name)
    return layer_of(imported.module)


# --- rules: source text and module name in, complaints out -----------------------------------------------


@functools.cache
def typing_lines(source: str) -> set[int]:
    """The lines under `if TYPE_CHECKING`, which only type checkers read."""
    blocks = [n for n, _ in nodes(source) if isinstance(n, ast.If) and "TYPE_CHECKING" in ast.unparse(n.test)]
    return {node.lineno for block in blocks for node in block.body}


def check_layers(source: str, module: str) -> list[str]:
    """A module imports only from layers above its own, and some layers from fewer."""
    layer = layer_of(module)
    if layer not in LAYERS:
        return [
            f"{module} belongs to no layer: add {layer!r} to LAYERS in tests/test_structure.py, below all it imports"
        ]
    complaints = []
    for imported in imports(source, module):
        if imported.root != "manymesh":
            continue
        target = target_layer(imported)
        where = f"{module}:{imported.line} imports {imported.path}"
        if imported.line in typing_lines(source) and target in ADAPTERS:
            continue
        if target not in LAYERS:
            complaints.append(f"{where}: {target!r} is no layer; add it to LAYERS in tests/test_structure.py")
        elif layer in NARROW and target not in NARROW[layer]:
            complaints.append(f"{where}: layer {layer!r} imports only {', '.join(sorted(NARROW[layer]))}")
        elif LAYERS.index(target) > LAYERS.index(layer):
            complaints.append(f"{where}: layer {target!r} is below layer {layer!r}")
    return complaints


def find_circle(sources: Mapping[str, str]) -> list[str]:
    """The modules of one import circle, the first one repeated at the end; empty where there is none."""
    edges: dict[str, list[str]] = {}
    for module, source in sources.items():
        targets = []
        for imported in imports(source, module):
            # `from .a import b` means the module a.b where there is one, else a name in a.
            names = (imported.path, f"{imported.path}.__init__", imported.module, f"{imported.module}.__init__")
            target = next((name for name in names if name in sources), None)
            if target is not None:
                targets.append(target)
        edges[module] = targets

    done: set[str] = set()

    def visit(module: str, trail: list[str]) -> list[str]:
        if module in trail:
            return [*trail[trail.index(module) :], module]
        if module in done:
            return []
        for target in edges[module]:
            if circle := visit(target, [*trail, module]):
                return circle
        done.add(module)
        return []

    return next((circle for module in edges if (circle := visit(module, []))), [])


def is_private_jax(path: str) -> bool:
    parts = path.split(".")
    if parts[0] == "jaxlib":
        return True
    second = parts[1] if len(parts) > 1 else ""
    dunder = second.startswith("__")  # jax.__version__ is public
    return parts[0] == "jax" and (second == "interpreters" or (second.startswith("_") and not dunder))


def dotted(node: ast.AST, aliases: Mapping[str, str]) -> str:
    """The text of `a.b.c`, with `a` replaced by the module it stands for; empty for anything else."""
    if isinstance(node, ast.Name):
        return aliases.get(node.id, "")
    if isinstance(node, ast.Attribute):
        head = dotted(node.value, aliases)
        return f"{head}.{node.attr}" if head else ""
    return ""


def check_private_jax(source: str, module: str) -> list[str]:
    """Only `_compat` touches private JAX: by import, by attribute (`jax._src.core`) or by `import_module`."""
    if layer_of(module) == "_compat":
        return []
    hits = [(found.line, found.path) for found in imports(source, module) if is_private_jax(found.path)]
    aliases = {"jax": "jax"}
    for node, _ in nodes(source):
        if isinstance(node, ast.Import):
            aliases |= {a.asname: a.name for a in node.names if a.asname and a.name.split(".")[0] == "jax"}
    for node, _ in nodes(source):
        if isinstance(node, ast.Attribute) and is_private_jax(path := dotted(node, aliases)) and path.count(".") == 1:
            hits.append((node.lineno, path))
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("import_module", "__import__")):
            words = [a.value for a in node.args if isinstance(a, ast.Constant) and isinstance(a.value, str)]
            hits += [(node.lineno, word) for word in words if is_private_jax(word)]
    return [f"{module}:{line} uses {path}: private JAX is touched in _compat alone" for line, path in hits]


def check_third_party(source: str, module: str) -> list[str]:
    """A layer imports only the packages it is allowed; other optional ones wait for the function that needs them."""
    layer = layer_of(module)
    allowed = THIRD_PARTY.get(layer, THIRD_PARTY_ELSEWHERE)
    complaints = []
    for imported in imports(source, module):
        root = imported.root
        if root == "manymesh" or root == "jaxlib" or root in sys.stdlib_module_names or root in allowed:
            continue  # jaxlib: check_private_jax speaks about it
        if imported.in_function and root in LAZY and layer not in CLOSED_LAYERS:
            continue
        permitted = ", ".join(["the standard library", *sorted(allowed)])
        complaints.append(f"{module}:{imported.line} imports {root}: layer {layer!r} imports only {permitted}")
    return complaints


def check_sizes(source: str, module: str) -> list[str]:
    """Functions and files stay short. A function counts from `def` to its last line, docstring included."""
    complaints = []
    lines = len(source.splitlines())
    if lines > MAX_FILE_LINES:
        complaints.append(f"{module} has {lines} lines, allowed are {MAX_FILE_LINES}: split it by idea")
    for node, _ in nodes(source):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > MAX_FUNCTION_LINES:
                complaints.append(
                    f"{module}:{node.lineno} {node.name} has {length} lines, allowed are {MAX_FUNCTION_LINES}"
                )
    return complaints


def check_lazy_imports(source: str, module: str) -> list[str]:
    """A function imports nothing but the optional packages in LAZY."""
    return [
        f"{module}:{found.line} imports {found.path} inside a function: only {', '.join(sorted(LAZY))} may be"
        for found in imports(source, module)
        if found.in_function and found.root not in LAZY
    ]


def signature_annotations(source: str) -> list[str]:
    """The annotations of all parameters and results of a source."""
    found: list[ast.expr | None] = []
    for node, _ in nodes(source):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            a = node.args
            parameters = [*a.posonlyargs, *a.args, *a.kwonlyargs, a.vararg, a.kwarg]
            found += [p.annotation for p in parameters if p is not None]
            found.append(node.returns)
    return [ast.unparse(annotation) for annotation in found if annotation is not None]


def share_of_bare_any(annotations: list[str]) -> float:
    """How many of the annotations say nothing: ``Any`` alone."""
    return annotations.count("Any") / max(len(annotations), 1)


def check_asserts(source: str, module: str) -> list[str]:
    """An `assert` marks a bug of ours and says which."""
    return [
        f"{module}:{node.lineno} asserts without a message"
        for node, _ in nodes(source)
        if isinstance(node, ast.Assert) and node.msg is None
    ]


def public_names(tree: ast.Module) -> set[str]:
    """What a face offers: names imported as themselves (`x as x`) and public definitions of its own.

    Also names that it imports for type checkers alone and loads on first use; modules of this kind are not in `__all__`.
    """
    names: set[str] = set()
    blocks = [n for n in tree.body if isinstance(n, ast.If) and "TYPE_CHECKING" in ast.unparse(n.test)]
    late = [n for block in blocks for n in block.body if isinstance(n, ast.ImportFrom) and n.module]
    for node in [*tree.body, *late]:
        if isinstance(node, ast.Import | ast.ImportFrom):
            names |= {alias.name for alias in node.names if alias.asname == alias.name}
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {target.id for target in targets if isinstance(target, ast.Name)}
    return {name for name in names if not name.startswith("_")}


def check_face(source: str, module: str) -> list[str]:
    """`__all__` is a sorted list of exactly the public names. Names like `__version__` may be in it."""
    tree = parse(source)
    listed: list[str] | None = None
    for node in tree.body:
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "__all__" for t in node.targets):
            listed = list(ast.literal_eval(node.value))
    if listed is None:
        return [f"{module} is public and has no __all__"]
    complaints = []
    by_kind = sorted(set(listed), key=lambda name: (not name.isupper(), not name[0].isupper(), name))
    if listed not in (sorted(set(listed)), by_kind):
        complaints.append(f"{module}: __all__ is not sorted or repeats a name; sorted: {sorted(set(listed))}")
    named = {name for name in listed if not (name.startswith("__") and name.endswith("__"))}
    public = public_names(tree)
    if missing := sorted(public - named):
        complaints.append(f"{module}: public but not in __all__: {', '.join(missing)}")
    if extra := sorted(named - public):
        complaints.append(f"{module}: in __all__ but not exported (`import x as x`): {', '.join(extra)}")
    return complaints


# --- the package follows the rules ------------------------------------------------------------------------


def read_package() -> dict[str, str]:
    """Module name to source for the whole package; a package's own file is `manymesh.meta.__init__`."""
    files = sorted((SRC / "manymesh").rglob("*.py"))
    return {".".join(file.relative_to(SRC).with_suffix("").parts): file.read_text("utf-8") for file in files}


SOURCES = read_package()


def is_face(module: str) -> bool:
    """A module that users import: `manymesh`, and modules right below it whose name has no underscore."""
    parts = module.removesuffix(".__init__").split(".")
    return len(parts) <= 2 and not parts[-1].startswith("_")


FACES = [module for module in SOURCES if is_face(module)]
RULES = [check_layers, check_private_jax, check_third_party, check_sizes, check_lazy_imports, check_asserts]


def test_the_package_is_found() -> None:
    """An empty list of sources would let every rule below pass."""
    assert "manymesh._errors" in SOURCES
    assert "manymesh.errors" in FACES


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_every_module_follows(rule) -> None:
    complaints = [complaint for module, source in SOURCES.items() for complaint in rule(source, module)]
    assert not complaints, "\n" + "\n".join(complaints)


def test_no_import_circles() -> None:
    circle = find_circle(SOURCES)
    assert not circle, " imports ".join(circle)


@pytest.mark.parametrize("module", FACES)
def test_all_lists_what_a_face_exports(module: str) -> None:
    complaints = check_face(SOURCES[module], module)
    assert not complaints, "\n" + "\n".join(complaints)


@pytest.mark.parametrize("room", sorted(TYPED))
def test_signatures_are_typed(room: str) -> None:
    """A bare `Any` checks nothing: a few at the border to JAX, no more."""
    found = [a for module, source in SOURCES.items() if layer_of(module) == room for a in signature_annotations(source)]
    assert len(found) > 100 and share_of_bare_any(found) < MAX_BARE_ANY, f"{share_of_bare_any(found):.0%} in {room}"


def test_the_package_is_typed() -> None:
    found = [a for source in SOURCES.values() for a in signature_annotations(source)]
    assert len(found) > 5000 and share_of_bare_any(found) < MAX_BARE_ANY, f"{share_of_bare_any(found):.0%} in all"


# --- the rules can fail -------------------------------------------------------------------------------------


def lines(count: int) -> str:
    return "x = 1\n" * count


# rule, module, source, a word of the complaint
BAD = [
    (check_layers, "manymesh._task", "from ._api._jit import jit", "below layer '_task'"),
    (check_layers, "manymesh._task", "from . import _api", "below layer '_task'"),
    (check_layers, "manymesh._task", "import manymesh._api", "below layer '_task'"),
    (check_layers, "manymesh._task", "from manymesh import jit", "layer '__init__' is below"),
    (check_layers, "manymesh._task", "from . import jit", "layer '__init__' is below"),
    (check_layers, "manymesh._program._uses", "from .._passes import PASSES", "below layer '_program'"),
    (check_layers, "manymesh.meta.__init__", "from .._topology import submeshes", "below layer 'meta'"),
    (check_layers, "manymesh._api", "def f():\n    from .flax import task", "below layer '_api'"),
    (check_layers, "manymesh.__init__", "from . import flax as flax", "below layer '__init__'"),
    (
        check_layers,
        "manymesh.__init__",
        "if TYPE_CHECKING:\n    from . import _flax as _flax",
        "below layer '__init__'",
    ),
    (check_layers, "manymesh._novel", "", "add '_novel' to LAYERS"),
    (check_layers, "manymesh._api", "from ._novel import x", "'_novel' is no layer"),
    (check_layers, "manymesh.schedules._gpipe", "from .._task import Task", "imports only _errors, schedules"),
    (check_layers, "manymesh._cost._memory", "from .._runtime._lower import lower", "imports only _compat, _cost"),
    (check_private_jax, "manymesh._task", "import jax._src.core", "jax._src.core"),
    (check_private_jax, "manymesh._task", "from jax._src import core", "jax._src.core"),
    (check_private_jax, "manymesh._task", "from jax import _src", "jax._src"),
    (check_private_jax, "manymesh._task", "from jax import interpreters", "jax.interpreters"),
    (check_private_jax, "manymesh._task", "import jax.interpreters.xla", "jax.interpreters.xla"),
    (check_private_jax, "manymesh._task", "import jaxlib", "jaxlib"),
    (check_private_jax, "manymesh._task", "import jax\njax._src.core.Jaxpr", "jax._src"),
    (check_private_jax, "manymesh._task", "import jax as j\nj.interpreters.mlir", "jax.interpreters"),
    (check_private_jax, "manymesh._task", "importlib.import_module('jax._src.core')", "jax._src.core"),
    (check_third_party, "manymesh.schedules._gpipe", "import numpy as np", "imports numpy"),
    (check_third_party, "manymesh.schedules._gpipe", "def f():\n    import rich", "imports rich"),
    (check_third_party, "manymesh.meta._boxes", "from flax import struct", "imports flax"),
    (check_third_party, "manymesh.meta._boxes", "def f():\n    import flax", "imports flax"),
    (check_third_party, "manymesh._api", "import optax", "imports optax"),
    (check_third_party, "manymesh.flax", "import equinox", "imports equinox"),
    (check_sizes, "manymesh._api", lines(MAX_FILE_LINES + 1), f"{MAX_FILE_LINES + 1} lines"),
    (check_sizes, "manymesh._api", "def f():\n" + "    x = 1\n" * MAX_FUNCTION_LINES, "f has 90 lines"),
    (check_lazy_imports, "manymesh._api", "def f():\n    import json", "imports json inside"),
    (check_lazy_imports, "manymesh._api", "def f():\n    from ._task import Task", "manymesh._task.Task inside"),
    (check_lazy_imports, "manymesh._api", "class A:\n    def f(self):\n        if x:\n            import jax", "jax"),
    (check_asserts, "manymesh._api", "assert x", ":1 asserts without"),
    (check_face, "manymesh.errors", "", "no __all__"),
    (check_face, "manymesh.errors", "from ._a import b as b\n__all__ = []", "not in __all__: b"),
    (check_face, "manymesh.flax", "def task(): ...\n__all__ = []", "not in __all__: task"),
    (check_face, "manymesh.errors", "from ._a import b\n__all__ = ['b']", "not exported (`import x as x`): b"),
    (check_face, "manymesh.errors", "from ._a import b as b, c as c\n__all__ = ['c', 'b']", "not sorted"),
    (
        check_face,
        "manymesh.__init__",
        "if _TYPE_CHECKING:\n    from ._a import b as b\n__all__ = []",
        "not in __all__: b",
    ),
    (check_face, "manymesh.errors", "from ._a import b as b\n__all__ = ['b', 'b']", "repeats"),
]

# rule, module, source: each stands near a case above and is allowed.
GOOD = [
    (check_layers, "manymesh._api", "from ._task import Task\nfrom . import _mark"),
    (check_layers, "manymesh.meta._logical", "from ._boxes import Partitioned\nfrom .._errors import AxisError"),
    (check_layers, "manymesh.__init__", "if TYPE_CHECKING:\n    from . import flax as flax"),
    (check_layers, "manymesh.flax", "import manymesh as mm\nfrom . import meta"),
    (check_layers, "manymesh.schedules._gpipe", "from .._errors import ScheduleError\nfrom . import _order"),
    (check_private_jax, "manymesh._compat", "from jax._src import core"),
    (check_private_jax, "manymesh._task", "import jax\nfrom jax.extend import core\nprint(jax.__version__)"),
    (check_private_jax, "manymesh._task", "class A:\n    def f(self):\n        return self.jax._src"),
    (check_third_party, "manymesh.schedules._gpipe", "from __future__ import annotations\nimport heapq"),
    (check_third_party, "manymesh.meta._boxes", "import jax.numpy as jnp\nimport numpy, rich"),
    (check_third_party, "manymesh.checkpoint", "def f():\n    import orbax.checkpoint"),
    (check_third_party, "manymesh.flax", "import flax.linen as nn\nimport optax"),
    (check_sizes, "manymesh._api", lines(MAX_FILE_LINES)),
    (check_sizes, "manymesh._api", "def f():\n" + "    x = 1\n" * (MAX_FUNCTION_LINES - 1)),
    (check_lazy_imports, "manymesh._api", "import json\ndef f():\n    from rich.table import Table"),
    (check_asserts, "manymesh._api", "assert x, 'x is missing'"),
    (check_face, "manymesh.__init__", "from ._a import B as B, c as c\n_d = 1\n__all__ = ['B', '__version__', 'c']"),
    (
        check_face,
        "manymesh.__init__",
        "if _TYPE_CHECKING:\n    from . import a as a\n    from ._b import c as c\n__all__ = ['c']",
    ),
]


@pytest.mark.parametrize(("rule", "module", "source", "word"), BAD)
def test_a_bad_source_is_rejected(rule, module: str, source: str, word: str) -> None:
    complaints = rule(source, module)
    assert len(complaints) == 1, complaints
    assert word in complaints[0]


@pytest.mark.parametrize(("rule", "module", "source"), GOOD)
def test_a_good_source_is_accepted(rule, module: str, source: str) -> None:
    assert rule(source, module) == []


@pytest.mark.parametrize(
    "sources",
    [
        {"manymesh.meta._a": "from ._b import x", "manymesh.meta._b": "from . import _a"},
        {"manymesh.meta.__init__": "from ._a import f as f", "manymesh.meta._a": "from . import f"},
        {"manymesh._a": "from ._b import x", "manymesh._b": "from ._c import x", "manymesh._c": "import manymesh._a"},
    ],
)
def test_a_circle_is_found(sources: dict[str, str]) -> None:
    circle = find_circle(sources)
    assert circle[0] == circle[-1]
    assert set(circle) == set(sources)


def test_a_diamond_is_no_circle() -> None:
    sources = {
        "manymesh.meta.__init__": "from ._a import f as f\nfrom ._b import g as g",
        "manymesh.meta._a": "from ._c import x",
        "manymesh.meta._b": "from . import _c",
        "manymesh.meta._c": "import jax",
    }
    assert find_circle(sources) == []


def test_tests_that_take_long_are_there() -> None:
    """A line of another name would leave nothing out."""
    missing = []
    for line in (SRC.parent / "tests" / "long.txt").read_text(encoding="utf-8").splitlines():
        path, _, name = line.partition("[")[0].partition("::")
        source = (SRC.parent / path).read_text(encoding="utf-8") if (SRC.parent / path).exists() else ""
        if not re.search(rf"^\s*(def|class) {name.rpartition('.')[2]}\b", source, re.MULTILINE):
            missing.append(line)
    assert not missing


def test_bare_any_is_counted() -> None:
    source = "def f(a: Any, *b: int, c: list[Any] = (), **d: Any) -> Any: ...\nasync def g(x): ..."
    assert sorted(signature_annotations(source)) == ["Any", "Any", "Any", "int", "list[Any]"]
    assert share_of_bare_any(signature_annotations(source)) == 3 / 5
