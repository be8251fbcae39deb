"""docs/explanation/threads-and-locks.md names every lock and thread of the sources, no others."""

import ast
import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "holdfast"
PAGE = ROOT / "docs" / "explanation" / "threads-and-locks.md"
SOURCES = [
    path for path in sorted(PACKAGE.rglob("*.py")) if PACKAGE / "testing" not in path.parents
]

LOCKS = {"Lock", "RLock", "Condition", "Semaphore", "BoundedSemaphore"}
NAMES_THREADS = {
    "Thread": "name",
    "ThreadPoolExecutor": 1,
    "workers": 1,
    "FairThreads": 2,
    "HedgedReads": 1,
    "_TierThread": 0,
}
"""Functions that start threads, and the argument that is the threads' name."""


@cache
def nodes_of(path):
    """All nodes of a module, itself first."""
    return list(ast.walk(ast.parse(path.read_text())))


def called(node):
    """The last part of the name of the function that a call calls; empty for another node."""
    if not isinstance(node, ast.Call):
        return ""
    return getattr(node.func, "attr", getattr(node.func, "id", ""))


def is_lock(node):
    return called(node) in LOCKS and ast.unparse(node.func).startswith(("threading.", "asyncio."))


def locks_of(path):
    """Yield each lock of a module: `Class.attribute`, or `module.variable`."""
    module, *others = nodes_of(path)
    classes = [(node.name, node) for node in others if isinstance(node, ast.ClassDef)]
    for owner, body in [(path.stem, module), *classes]:
        for node in ast.walk(body):
            if isinstance(node, ast.Assign) and is_lock(node.value):
                target = node.targets[0]
                if isinstance(target, ast.Name) == (owner == path.stem):
                    yield f"{owner}.{getattr(target, 'attr', getattr(target, 'id', ''))}"


def locks_made(path):
    """How many calls of a module make a lock that no other lock is made of."""
    made = [node for node in nodes_of(path) if is_lock(node)]
    inner = [argument for node in made for argument in node.args]
    return sum(node not in inner for node in made)


def text_of(node, function):
    """The name that an expression makes, NAME for each part that is known later only."""
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.JoinedStr):
        parts = [part.value if isinstance(part, ast.Constant) else "NAME" for part in node.values]
        return "".join(parts)
    assigned = [
        each.value
        for each in ast.walk(function)
        if isinstance(each, ast.Assign) and ast.unparse(each.targets[0]) == ast.unparse(node)
    ]
    assert assigned, f"the name of a thread is not to be seen where it starts: {ast.unparse(node)}"
    return text_of(assigned[0], function)


def threads_of(node, function=None):
    """Yield the name of each kind of thread that a module starts."""
    for child in ast.iter_child_nodes(node):
        if getattr(child, "name", "") in NAMES_THREADS:
            continue  # it gets the name from its caller
        if (starts := called(child)) in NAMES_THREADS:
            where = NAMES_THREADS[starts]
            by_keyword = {each.arg: each.value for each in child.keywords}
            name = by_keyword.get("name") if where == "name" else child.args[where]
            assert name is not None, f"a thread without a name: {ast.unparse(child)}"
            yield text_of(name, function)
        yield from threads_of(child, child if isinstance(child, ast.FunctionDef) else function)


def named(heading):
    """What the first column of the tables below a heading of the page names."""
    _, _, rest = PAGE.read_text().partition(f"\n## {heading}\n")
    rows = [line for line in rest.partition("\n## ")[0].splitlines() if line.startswith("| `")]
    return [name for row in rows for name in re.findall(r"`([^`]+)`", row.split(" | ")[0])]


def test_the_page_names_every_lock_of_the_sources_and_no_other():
    locks = {lock for path in SOURCES for lock in locks_of(path)}
    assert sum(map(locks_made, SOURCES)) == len(locks), "a lock that is not assigned to a name"
    assert sorted(named("Locks")) == sorted(locks)


def test_the_page_names_every_kind_of_thread_of_the_sources_and_no_other():
    threads = {name for path in SOURCES for name in threads_of(nodes_of(path)[0])}
    assert sorted(set(named("Threads"))) == sorted(threads)
    assert not [name for name in threads if not name.startswith("holdfast-")]
