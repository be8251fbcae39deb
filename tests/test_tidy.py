"""The rules of the house as tests; CONTRIBUTING.md says them in words."""

import ast
import re
import subprocess
import sys
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "holdfast"
BENCH = ROOT / "src" / "holdfast_bench"
SOURCES = sorted([*PACKAGE.rglob("*.py"), *BENCH.rglob("*.py")])
OURS = sorted(
    path
    for folder in ("src", "tests", "tools", "bench", "examples", "docs")
    for path in (ROOT / folder).rglob("*.py")
)

# What may break a rule, and why: "rule where" as the failing test prints it -> the reason.
KERNELS = "few_parameters src/holdfast/devices/cuda/kernels.py"
EXCEPTIONS: dict[str, str] = {
    f"{KERNELS} copy_pages": "a kernel takes numbers and addresses only",
    f"{KERNELS} convert_pages": "a kernel takes numbers and addresses only",
}

FILE_LINES_MAX = 600
FUNCTION_LINES_MAX = 80
PARAMETERS_MAX = 6
NESTING_MAX = 4

NOTE_TO_ONESELF = re.compile(r"\b(TO(?:)DO|FIX(?:)ME|HA(?:)CK|X(?:)XX)\b")
EMPTY_NAME = re.compile(
    r"(^|_)(utils?|common|misc|support|help\w*|managers?)(_|$)|^(base|new)_|_v\d+$"
)
NAMED_FILE = re.compile(r"`((?:src|tests|tools|examples|docs|deploy|traces)/[\w./-]*\w)`")
# Words of an earlier private dialect, for which the field has terms of its own: as names.
PRIVATE_WORDS = frozenset(
    [
        "abreast",
        "adopt",
        "adopted",
        "berth",
        "berths",
        "borrow",
        "borrowable",
        "climb",
        "climber",
        "climbers",
        "climbing",
        "climbs",
        "commons",
        "condemn",
        "descent",
        "descents",
        "dice",
        "doorstep",
        "doorway",
        "era",
        "errand",
        "errands",
        "fleeting",
        "hearsay",
        "hindsight",
        "hopeless",
        "judgement",
        "keeper",
        "learnt",
        "lent",
        "outlook",
        "races",
        "rig",
        "roster",
        "rung",
        "rungs",
        "settle",
        "standstills",
        "stopwatch",
        "strangers",
        "strayed",
        "strays",
        "tally",
        "teller",
        "trials",
        "twins",
        "unproven",
        "untried",
        "unwanted",
        "unwell",
        "vacate",
        "wish",
        "wishes",
        "worths",
    ]
)
UNSAFE_MODULES = {"cloudpickle", "dill", "marshal", "pickle", "shelve"}
UNSAFE_CALLS = {"eval", "exec", "yaml.load", "yaml.unsafe_load", "torch.load"}
ENGINES = {"sglang", "tensorrt_llm", "torch", "transformers", "vllm"}
BESIDE_ENGINES = {"devices", "engines", "holdfast_bench"}
HTTP_CALLS = {"_call", "call", "stream"}
"""Methods of HTTP clients that decode what comes as the class that they are given."""

IN_ONE_THREAD = {"cli", "holdfast_bench", "sim", "testing"}
ENVIRONMENT = {"os.environ", "os.environb", "os.getenv", "os.putenv"}
DEEPER = (ast.If, ast.For, ast.AsyncFor, ast.While, ast.With, ast.AsyncWith, ast.Try, ast.Match)


@cache
def tree(path):
    return ast.parse(path.read_text())


@cache
def lines(path):
    return path.read_text().splitlines()


def folder(path):
    """The folder of `holdfast` that a module is in, or "holdfast_bench"."""
    parts = path.relative_to(PACKAGE.parent).parts
    return parts[0] if parts[0] == BENCH.name else parts[1]


def where(path, name=""):
    return f"{path.relative_to(ROOT)} {name}".strip()


def functions(path):
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return (node for node in ast.walk(tree(path)) if isinstance(node, kinds))


def dotted(node):
    """The dotted name that an expression spells, or nothing."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def reason_beside(path, number):
    """Whether a line of code ends in a comment that says something to a reader."""
    comment = lines(path)[number - 1].partition("#")[2]
    return bool(re.search(r"[a-z]{2,} [a-z]", re.sub(r"noqa: [A-Z0-9, ]+", "", comment)))


# A rule yields (where, what is wrong) for everything that breaks it.


def short_files():
    for path in OURS:
        if len(lines(path)) > FILE_LINES_MAX:
            yield where(path), f"{len(lines(path))} lines, at most {FILE_LINES_MAX}"


def short_functions():
    for path in OURS:
        for node in functions(path):
            length = node.end_lineno - node.lineno + 1
            if length > FUNCTION_LINES_MAX:
                yield where(path, node.name), f"{length} lines, at most {FUNCTION_LINES_MAX}"


def few_parameters():
    for path in OURS:
        for node in functions(path):
            names = [a.arg for a in (*node.args.posonlyargs, *node.args.args)]
            count = len(names) + len(node.args.kwonlyargs) - (names[:1] in (["self"], ["cls"]))
            if count > PARAMETERS_MAX:
                yield where(path, node.name), f"{count} parameters, at most {PARAMETERS_MAX}"


def depth(node):
    """How deep statements nest below a node; an elif is as deep as its if."""
    here = 0
    for child in ast.iter_child_nodes(node):
        elif_ = isinstance(node, ast.If) and [child] == node.orelse and isinstance(child, ast.If)
        here = max(here, depth(child) + (isinstance(child, DEEPER) and not elif_))
    return here


def shallow_nesting():
    for path in OURS:
        for node in functions(path):
            if depth(node) > NESTING_MAX:
                yield where(path, node.name), f"nested {depth(node)} deep, at most {NESTING_MAX}"


def no_notes_to_oneself():
    for path in (*OURS, *ROOT.glob("*.toml"), ROOT / "Makefile"):
        for number, text in enumerate(lines(path), 1):
            if NOTE_TO_ONESELF.search(text):
                yield f"{where(path)}:{number}", "open an issue instead"


def names_say_something():
    for path in SOURCES:
        classes = (node.name for node in ast.walk(tree(path)) if isinstance(node, ast.ClassDef))
        for name in (path.stem, path.parent.name, *classes):
            if EMPTY_NAME.search(re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()):
                yield where(path, name), "name it by what it is"


def class_names_mean_one_thing():
    places = {}
    for path in SOURCES:
        for node in tree(path).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places.setdefault(node.name, []).append(path)
    for name, paths in places.items():
        for path in paths[1:]:
            yield where(path, name), f"{where(paths[0])} has a class of this name; rename one"


def names_are_the_fields_terms():
    for path in SOURCES:
        for node in ast.walk(tree(path)):
            for name in names_of(node):
                parts = re.findall(r"[a-z]+|[A-Z][a-z]+|[A-Z]+(?![a-z])", name)
                if private := PRIVATE_WORDS & {part.lower() for part in parts}:
                    yield where(path, name), f"{min(private)} is no term of the field"


def names_of(node):
    """The identifiers that a node introduces or uses."""
    fields = {
        ast.FunctionDef: "name",
        ast.AsyncFunctionDef: "name",
        ast.ClassDef: "name",
        ast.arg: "arg",
        ast.keyword: "arg",
        ast.Name: "id",
        ast.Attribute: "attr",
    }
    name = getattr(node, fields[type(node)]) if type(node) in fields else None
    return [name] if name else []


def environment_is_read_in_config():
    for path in SOURCES:
        if path.parent == PACKAGE / "config":
            continue
        for node in ast.walk(tree(path)):
            imported = isinstance(node, ast.ImportFrom) and node.module == "os"
            names = {f"os.{a.name}" for a in node.names} if imported else {dotted(node)}
            if not names & ENVIRONMENT:
                continue
            # What starts other programs hands its environment on, and says so on the line.
            starter = folder(path) in ("cli", BENCH.name)
            if not (starter and reason_beside(path, node.lineno)):
                yield f"{where(path)}:{node.lineno}", "read it in config/"


def imported_roots(node):
    """The outermost packages that an import statement names; none for any other node."""
    if isinstance(node, ast.ImportFrom):
        return set() if node.level else {node.module.partition(".")[0]}
    names = node.names if isinstance(node, ast.Import) else ()
    return {alias.name.partition(".")[0] for alias in names}


def engines_stay_at_the_edge():
    for path in SOURCES:
        if folder(path) not in BESIDE_ENGINES:
            for node in ast.walk(tree(path)):
                if engine := imported_roots(node) & ENGINES:
                    yield f"{where(path)}:{node.lineno}", f"{engine.pop()} comes with an engine"


def nothing_loads_code():
    for path in OURS:
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.Import | ast.ImportFrom):
                unsafe = imported_roots(node) & UNSAFE_MODULES
            else:
                unsafe = {dotted(getattr(node, "func", None))} & UNSAFE_CALLS
            if unsafe:
                yield f"{where(path)}:{node.lineno}", f"{unsafe.pop()} runs what it reads"


def unprepared_classes():
    """The names of classes that several threads may not decode at once."""
    nodes = (node for path in SOURCES for node in ast.walk(tree(path)))
    classes = [node for node in nodes if isinstance(node, ast.ClassDef)]
    ready = {node.name for node in classes if "prepared" in map(dotted, node.decorator_list)}
    return {node.name for node in classes} - ready


def what_threads_decode_is_prepared():
    unprepared = unprepared_classes()
    for path in SOURCES:
        threads = folder(path) not in {*IN_ONE_THREAD, "prepared.py"}
        for node in (node for each in functions(path) for node in ast.walk(each) if threads):
            name = dotted(node.func).rpartition(".")[2] if isinstance(node, ast.Call) else ""
            if name == "Decoder":
                yield f"{where(path)}:{node.lineno}", "make decoders where the module begins"
            told = {dotted(k.value) for k in node.keywords if k.arg == "type"} if name else set()
            if name == "convert" or (folder(path) == "membership" and name in HTTP_CALLS):
                told |= set(map(dotted, node.args))
            for kind in sorted(told & unprepared):
                yield f"{where(path)}:{node.lineno}", f"{kind} is not @prepared"


def broad_excepts_give_a_reason():
    for path in SOURCES:
        for node in ast.walk(tree(path)):
            if not isinstance(node, ast.ExceptHandler):
                continue
            caught = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
            broad = {dotted(kind) for kind in caught} & {"", "Exception", "BaseException"}
            passed_on = isinstance(node.body[-1], ast.Raise) and node.body[-1].exc is None
            if broad and not passed_on and not reason_beside(path, node.lineno):
                yield f"{where(path)}:{node.lineno}", "catch what can happen, or say why not"


def modules_say_what_they_are():
    for path in SOURCES:
        first, _, rest = (ast.get_docstring(tree(path)) or "").partition("\n")
        one_sentence = first.endswith(".") and not re.search(r"[.!?] [A-Z]", first)
        if not one_sentence or rest.lstrip(" ")[:1] not in ("", "\n"):
            yield where(path), "the docstring's first line is one sentence, then a blank line"


def is_elapsed(node):
    """Whether an expression is a difference from a clock, or a `StallWatch`'s time since then."""
    clocks = ("monotonic", "perf_counter", "process_time", "time")
    if isinstance(node, ast.Call) and dotted(node.func) in ("stalls.since", "watch.since"):
        return True
    return isinstance(node, ast.BinOp) and any(
        isinstance(call, ast.Call) and dotted(call.func).rpartition(".")[2] in clocks
        for call in ast.walk(node)
        if isinstance(node.op, ast.Sub)
    )


def no_test_asserts_a_clock():
    """No test fails because a machine is slow; a loop that waits may end at a time, as a limit."""
    for path in sorted((ROOT / "tests").rglob("*.py")):
        asserted = (node for node in ast.walk(tree(path)) if isinstance(node, ast.Assert))
        for node in (part for each in asserted for part in ast.walk(each.test)):
            if not isinstance(node, ast.Compare):
                continue
            sides = pairwise([node.left, *node.comparators])
            for (left, right), op in zip(sides, node.ops, strict=True):
                upper = left if isinstance(op, ast.Lt | ast.LtE) else right
                if isinstance(op, ast.Lt | ast.LtE | ast.Gt | ast.GtE) and is_elapsed(upper):
                    yield f"{where(path)}:{node.lineno}", "asserts that something took no longer"


RULES = [
    short_files,
    short_functions,
    few_parameters,
    shallow_nesting,
    no_notes_to_oneself,
    names_say_something,
    class_names_mean_one_thing,
    names_are_the_fields_terms,
    environment_is_read_in_config,
    engines_stay_at_the_edge,
    nothing_loads_code,
    broad_excepts_give_a_reason,
    what_threads_decode_is_prepared,
    modules_say_what_they_are,
    no_test_asserts_a_clock,
]


@cache
def findings(rule):
    return list(rule())


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_rule_holds(rule):
    broken = [
        (at, what) for at, what in findings(rule) if f"{rule.__name__} {at}" not in EXCEPTIONS
    ]
    assert not broken, "".join(f"\n  {rule.__name__} {at}: {what}" for at, what in broken)


def test_exceptions_are_still_needed():
    needed = {f"{rule.__name__} {at}" for rule in RULES for at, _ in findings(rule)}
    assert set(EXCEPTIONS) <= needed


def module_name(path):
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported(path):
    """Every dotted name that a module imports, in functions and for typing too, or spells out.

    Spelling counts because a module that is loaded on demand is named in a string.
    """
    package = path.relative_to(PACKAGE.parent).parent.parts
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) + 1 - node.level] if node.level else ()
            base = ".".join((*above, *filter(None, [node.module])))
            yield from (base, *(f"{base}.{alias.name}" for alias in node.names))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def test_every_module_is_reachable_from_an_entry_point():
    modules = {module_name(path): path for path in SOURCES}
    doors = (
        "holdfast.__main__",
        "holdfast.cli",
        "holdfast.engines",
        "holdfast.testing",
        "holdfast_bench.campaigns",
        "holdfast_bench.cli",
        "holdfast_bench.verbs",
    )
    todo = [m for m in modules if m == "holdfast" or m.startswith(doors)]
    reached = set()
    while todo:
        module = todo.pop()
        if module in modules and module not in reached:
            reached.add(module)
            todo += [*imported(modules[module]), module.rpartition(".")[0]]
    assert sorted(set(modules) - reached) == []


def test_folders_of_tests_mirror_folders_of_the_source():
    tests = ROOT / "tests"
    own = {Path(), Path("deploy"), Path("incidents")}  # of no package: see CONTRIBUTING.md
    folders = {file.parent.relative_to(tests) for file in tests.rglob("test_*.py")} - own
    assert len(folders) > 20
    sources = {
        each: BENCH / each.relative_to("bench") if each.parts[0] == "bench" else PACKAGE / each
        for each in folders
    }
    assert sorted(str(each) for each, source in sources.items() if not source.is_dir()) == []


def test_importing_holdfast_loads_msgspec_only():
    script = (
        "import sys; before = set(sys.modules); import holdfast;"
        "print(*{m.partition('.')[0] for m in set(sys.modules) - before})"
    )
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    loaded = set(out.stdout.split()) - sys.stdlib_module_names
    assert loaded <= {"holdfast", "msgspec"}


def test_architecture_page_lists_every_module():
    script = [sys.executable, str(ROOT / "tools" / "architecture.py"), "--check"]
    checked = subprocess.run(script, capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stderr


def test_pages_name_files_that_are_there():
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    named = {(page.name, file) for page in pages for file in NAMED_FILE.findall(page.read_text())}
    assert len(named) > 10
    assert sorted(each for each in named if not (ROOT / each[1]).exists()) == []


def test_the_engine_client_has_no_words_of_one_engine():
    words = re.compile(r"vllm|sglang|lmcache|num_preemptions|kv_transfer", re.IGNORECASE)
    sources = (PACKAGE / "client").rglob("*.py")
    assert [file.name for file in sources if words.search(file.read_text())] == []
