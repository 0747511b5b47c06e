"""Structure of the source tree: its import graph and its layers.

``tests/unit/test_imports.py`` checks this tree.
"""

import ast
from collections import defaultdict
from functools import cache, cached_property
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = ("coordinator", "gpuworker", "runtime")

LAYERS = (
    ("coordinator",),
    ("runtime/core",),
    ("runtime/device", "runtime/timeline"),
    ("runtime/collective", "runtime/checkpoint"),
    ("runtime/data",),
    ("runtime/replica", "runtime/evaluation"),
    (
        "runtime/worker",
        "runtime/fsdp",
        "runtime/loop",
        "runtime/cluster",
        "runtime/monitor",
        "runtime/loggers",
    ),
    ("runtime",),
    ("gpuworker",),
)
"""Folders from the bottom up. Imports go down, or stay in their folder."""

MAX_TOP_MODULES = 10
MAX_DEPTHS = {"coordinator": 9, "runtime": 21}
"""Longest chain of imports in a package, in modules."""
MAX_PACKAGE_DEPTH = 6
"""Longest chain of imports between the packages of ``runtime/``."""

MODULE_NAMES = {"logger", "_c10d", "__all__"}
"""Names that modules of one package may share: loggers and aliases of imported modules."""

MAX_FUNCTION_LINES = 80

FILE_NAMES = ("__init__.py", "__main__.py", "base.py")
"""Names that every package may have."""

OPENINGS = {
    "runtime/replica/batch_norm.py",  # its layers follow the function that makes them
}
"""Files that do not open with the class that they are named after; none may be added."""


def relative(path, root=ROOT):
    """A path relative to the root, as in messages."""
    return path.relative_to(root).as_posix()


def sources(*packages, root=ROOT):
    """The Python files of packages, sorted."""
    return sorted(path for package in packages for path in (root / package).rglob("*.py"))


def parse(path):
    """The syntax tree of a file, parsed once for each text."""
    return _parse(path.read_text(encoding="utf-8"), str(path))


@cache
def _parse(text, filename):
    return ast.parse(text, filename=filename)


def called(node):
    """Dotted name of the called function, as far as it consists of names."""
    parts, target = [], node.func
    while isinstance(target, ast.Attribute):
        parts.append(target.attr)
        target = target.value
    parts.append(target.id if isinstance(target, ast.Name) else "")
    return ".".join(reversed(parts))


def imports_of(path, root=ROOT, tree=None):
    """``(module, name)`` of all that a file imports, wherever in it and however.

    The names are absolute; of ``import module`` the second one is ``None``.
    """
    package = path.relative_to(root).parent.parts
    for node in ast.walk(tree or parse(path)):
        if isinstance(node, ast.Import):
            yield from ((alias.name, None) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) + 1 - node.level] if node.level else ()
            module = ".".join((*base, *filter(None, [node.module])))
            yield from ((module, alias.name) for alias in node.names)
        elif isinstance(node, ast.Call) and called(node).endswith(("import_module", "__import__")):
            values = [a.value for a in node.args if isinstance(a, ast.Constant)]
            yield from ((value, None) for value in values if isinstance(value, str))


def imported_modules(path, root=ROOT, tree=None):
    """Names of all modules that a file imports; of ``from a import b`` both ``a`` and ``a.b``."""
    for module, name in imports_of(path, root, tree):
        yield module
        if name is not None:
            yield f"{module}.{name}"


class House:
    """A tree of sources, read once.

    Attributes:
        root: Directory of ``coordinator/`` and ``runtime/``.
        files: Their Python files, relative to the root, each with its syntax tree.
    """

    def __init__(self, root=ROOT):
        self.root = root
        self.files = {relative(p, root): parse(p) for p in sources(*PACKAGES, root=root)}

    @cached_property
    def graph(self):
        """The files that each file imports, those under ``TYPE_CHECKING`` and lazy ones too."""
        graph = {}
        for file, tree in self.files.items():
            found = {
                self._file_of(f"{module}.{name}") or self._file_of(module)
                for module, name in imports_of(self.root / file, self.root, tree)
            }
            graph[file] = found - {None, file}
        return graph

    def _file_of(self, name):
        """The file of a module or package; ``None`` for modules of other projects."""
        stem = name.replace(".", "/")
        return next((f for f in (f"{stem}.py", f"{stem}/__init__.py") if f in self.files), None)

    def below(self, *entries, without=()):
        """These files, and the files of the runtime that they import, directly or not.

        Args:
            entries: These files.
            without: Files that are left out with their imports.
        """
        found, todo = set(), list(entries)
        while todo:
            file = todo.pop()
            if file not in (*found, *without) and not file.startswith("coordinator/"):
                found.add(file)
                todo += self.graph[file]  # a missing entry is an error
        return sorted(found)

    # -- violations, one line each ---------------------------------------------------------

    def wrong_ways(self):
        """Imports that do not go down and do not stay in their folder."""
        for file, targets in sorted(self.graph.items()):
            for target in sorted(targets):
                here, there = _folder(file), _folder(target)
                if here != there and _layer(there) >= _layer(here):
                    way = "up" if _layer(there) > _layer(here) else "across"
                    yield f"{file} imports {way}: {target}"

    def without_layer(self):
        """Folders without a layer."""
        known = {folder for layer in LAYERS for folder in layer}
        yield from sorted(
            f"{folder} has no layer" for folder in {_folder(f) for f in self.files} - known
        )

    def circles(self):
        """Files that import each other, directly or not."""
        for ring in _rings(self.graph):
            yield "a circle of imports: " + ", ".join(sorted(ring))

    def chain(self, package):
        """A longest chain of imports inside a package, from the top, without its ``__init__``."""
        files = {
            f for f in self.files if f.startswith(f"{package}/") and f != f"{package}/__init__.py"
        }
        longest = {}

        def down(file, seen):
            if file not in longest:
                below = [down(t, {*seen, file}) for t in self.graph[file] & files if t not in seen]
                longest[file] = [file, *max(below, key=len, default=[])]
            return longest[file]

        return max((down(f, set()) for f in sorted(files)), key=len, default=[])

    @cached_property
    def packages(self):
        """The packages that each package of ``runtime/`` imports."""
        graph = defaultdict(set)
        for file, targets in self.graph.items():
            if file.startswith("runtime/") and file != "runtime/__init__.py":
                found = {_folder(t) for t in targets if t.startswith("runtime/")}
                graph[_folder(file)] |= found - {_folder(file)}
        return graph

    def package_chain(self):
        """A longest chain of imports between packages of ``runtime/``, from the top."""

        def down(package, seen):
            below = [down(t, {*seen, t}) for t in self.packages[package] if t not in seen]
            return [package, *max(below, key=len, default=[])]

        return max((down(p, {p}) for p in sorted(self.packages)), key=len, default=[])

    def package_circles(self):
        """Packages that import each other, directly or not."""
        for ring in _rings({p: set(self.packages[p]) for p in list(self.packages)}):
            yield "a circle of packages: " + ", ".join(sorted(ring))

    def deep(self):
        """Chains of imports that are too long, of modules and of packages."""
        chains = [(self.chain(package), most) for package, most in MAX_DEPTHS.items()]
        for chain, most in (*chains, (self.package_chain(), MAX_PACKAGE_DEPTH)):
            if len(chain) > most:
                yield f"{len(chain)} deep: " + " > ".join(f.split("/")[-1] for f in chain)

    def crowded(self):
        """Too many modules at the top."""
        top = [f for f in self.files if _folder(f) == "runtime"]
        if len(top) > MAX_TOP_MODULES:
            yield f"{len(top)} modules in runtime/: " + ", ".join(f.split("/")[-1] for f in top)

    def twins(self):
        """A module and a folder beside it, two files, or two public classes, with one name."""
        folders = {f.rsplit("/", 1)[0] for f in self.files}
        yield from (
            f"{f} has the name of a folder beside it"
            for f in self.files
            if f.removesuffix(".py") in folders
        )
        names = defaultdict(list)
        for file in self.files:
            names[file.rsplit("/", 1)[1]].append(file)
        yield from (
            f"the name of {' and '.join(files)} is defined twice"
            for name, files in sorted(names.items())
            if len(files) > 1 and name not in FILE_NAMES
        )
        classes = defaultdict(list)
        for file, tree in self.files.items():
            for node in tree.body:
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    classes[node.name].append(file)
        yield from (
            f"class {name} is in " + ", ".join(files)
            for name, files in sorted(classes.items())
            if len(files) > 1
        )

    def doubles(self):
        """Module-level names (classes, constants, aliases) that a package defines twice."""
        names = defaultdict(list)
        for file, tree in self.files.items():
            for node in () if file.endswith("/__init__.py") else tree.body:
                for name in _defined(node):
                    names[_folder(file), name].append(file)
        yield from (
            f"{name} is in " + ", ".join(sorted(files))
            for (_, name), files in sorted(names.items())
            if len(files) > 1 and name not in MODULE_NAMES
        )

    def openings(self):
        """Files whose first public class or function is not the class that they are named after.

        Enumerations, exceptions, protocols and bases of the others may come first, which need them.
        """
        for file, tree in sorted(self.files.items()):
            classes = [n for n in tree.body if isinstance(n, ast.ClassDef)]
            bases = {ast.unparse(base) for each in classes for base in each.bases}
            opening = [n for n in tree.body if _opens(n)]
            public = [n for n in opening if n.name not in bases or _is_named(n, file)]
            named = [n.name for n in public if isinstance(n, ast.ClassDef) and _is_named(n, file)]
            if named and not _is_named(public[0], file) and file not in OPENINGS:
                yield f"{file} opens with {public[0].name} and not with {named[0]}"

    def long(self):
        """Functions of too many lines."""
        for file, tree in sorted(self.files.items()):
            for node in ast.walk(tree):
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                    lines = node.end_lineno - node.lineno + 1
                    if lines > MAX_FUNCTION_LINES:
                        yield f"{file}: {node.name} has {lines} lines"

    def foreign(self):
        """Imports of the runtime in the coordinator, existing modules or not."""
        for file in self.files:
            if _folder(file) == "coordinator":
                tree = self.files[file]
                for name, _ in imports_of(self.root / file, self.root, tree):
                    if name.split(".")[0] == "runtime":
                        yield f"{file} imports {name}"

    RULES = (
        wrong_ways,
        without_layer,
        foreign,
        circles,
        package_circles,
        deep,
        crowded,
        twins,
        doubles,
        openings,
        long,
    )

    def faults(self):
        """All violations."""
        return [fault for rule in self.RULES for fault in rule(self)]


def _folder(file):
    """The folder of a file for the layers; the coordinator counts as one."""
    folder = file.rsplit("/", 1)[0]
    return "coordinator" if folder.startswith("coordinator/") else folder


def _defined(node):
    """Names of classes, constants and aliases that a statement of a module defines."""
    if isinstance(node, ast.ClassDef):
        return {node.name}
    if isinstance(node, ast.AnnAssign):
        targets = [node.target]
    else:
        targets = node.targets if isinstance(node, ast.Assign) else []
    elements = [e for t in targets for e in (t.elts if isinstance(t, ast.Tuple) else [t])]
    return {element.id for element in elements if isinstance(element, ast.Name)}


def _opens(node):
    """True for a public class or function, except enumerations, exceptions and protocols."""
    if not isinstance(node, ast.ClassDef | ast.FunctionDef) or node.name.startswith("_"):
        return False
    bases = [ast.unparse(base) for base in getattr(node, "bases", ())]
    return not any(b.endswith(("Enum", "Error", "Exception", "Protocol")) for b in bases)


def _is_named(node, file):
    """True if the file is named after the class or function, or its first or last words."""
    stem = file.rsplit("/", 1)[-1].removesuffix(".py").replace("_", "")
    stems = {stem, stem.removesuffix("s"), f"{stem}s"}
    name = node.name.replace("_", "").lower()
    return any(name.startswith(s) or name.endswith(s) for s in stems)


def _layer(folder):
    """The number of a folder's layer; 0 for an unknown folder."""
    return next((i for i, layer in enumerate(LAYERS) if folder in layer), 0)


def _rings(graph):
    """Strongly connected components of two files or more."""

    def reached(file):
        found, todo = set(), [file]
        while todo:
            new = graph[todo.pop()] - found
            found |= new
            todo += new
        return found

    reach = {file: reached(file) for file in graph}
    rings = {frozenset(g for g in reach[f] if f in reach[g]) for f in graph if f in reach[f]}
    return sorted(rings, key=sorted)
