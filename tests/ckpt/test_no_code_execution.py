"""Reading a checkpoint runs nothing: by what the code can do, and by what it is seen to do."""

from __future__ import annotations

import ast
import copy
import subprocess
import sys
from pathlib import Path
from typing import Any

from parallel.layout import Topology
from tests.ckpt.test_untrusted import envelope, places
from tests.support.checkpoints import memory_folder, save_with_threads

ROOT = Path(__file__).parents[2]


PICKLES = {
    # It says what a pickle holds and executes nothing of the pickle.
    "ckpt/interop/safe_pickle.py": "pickle.Unpickler",
    "ckpt/interop/dcp_writer.py": "pickle.dumps",
    "ckpt/interop/torch_writer.py": "pickle.Pickler",
}
RUNS_WHAT_IT_READS = {"pickle", "dill", "cloudpickle", "marshal", "shelve", "joblib", "runpy"}


def test_no_module_of_ckpt_can_run_what_it_reads():
    paths = sorted((ROOT / "ckpt").rglob("*.py"))
    assert len(paths) > 10
    for path in paths:
        name = str(path.relative_to(ROOT))
        for node in ast.walk(ast.parse(path.read_text())):
            imported = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                imported = [node.module or ""]
            found = RUNS_WHAT_IT_READS & {part.split(".")[0] for part in imported}
            assert not found or name in PICKLES, f"{name} imports {found}"
            if isinstance(node, ast.Attribute) and ast.unparse(node).startswith("pickle."):
                used = ast.unparse(node)
                assert used == PICKLES[name] or used.endswith("Error"), f"{name} uses {used}"
            if isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                assert called not in ("eval", "exec", "compile", "__import__"), f"{name}: {called}"
                assert called != "torch.load", f"{name} loads what torch.save wrote"
                # A multiprocessing connection's recv() unpickles; recv_bytes() does not.
                assert not called.endswith(".recv"), f"{name}: {called}"
                pickles = [k for k in node.keywords if k.arg == "allow_pickle"]
                assert not pickles, f"{name} lets numpy unpickle"


AUDIT = """
import sys
import ckpt, numpy, torch, zarr
from hypothesis import strategies as st
import tests.ckpt.test_no_code_execution as tests
from pathlib import Path
from tests.ckpt.test_untrusted import read_everything

root = Path(sys.argv[1])
read_everything(root)  # what is imported on first use is imported now
seen = []

def watch(event, arguments):
    if not watching:
        return
    if event == "open":
        path, mode, flags = arguments
        if isinstance(mode, str) and set(mode) & set("wax+") or flags & 3:
            seen.append((event, path))
    elif event in BAD or event.split(".")[0] in BAD:
        seen.append((event, arguments))

BAD = {"exec", "compile", "import", "subprocess", "os.system", "os.exec", "os.posix_spawn",
       "os.fork", "os.remove", "os.rename", "os.link", "os.mkdir", "os.truncate", "pickle",
       "marshal", "ctypes", "socket", "shutil", "os.chmod"}
watching = False
sys.addaudithook(watch)
import json
count = 0
path = root / ckpt.format.manifest_key(5)
original = path.read_bytes()
body = json.loads(original)["manifest"]
objects = root / ckpt.format.objects_key(body["save_id"])
trees = tests.audited_forgeries(body)
for data in [original, *trees]:
    path.write_bytes(data)
    watching = True
    try:
        read_everything(root)
        whole = True
    except ckpt.CheckpointError:
        whole = False
    watching = False
    assert whole == (data == original)
    count += 1
path.write_bytes(original)
for key in sorted(ckpt.read_manifest(root).objects):
    data = (objects / key).read_bytes()
    for at in range(0, len(data), 1 + len(data) // 9):
        (objects / key).write_bytes(data[:at] + bytes([data[at] ^ 255]) + data[at + 1:])
        watching = True
        try:
            read_everything(root)
        except ckpt.CheckpointError:
            count += 1
        watching = False
    (objects / key).write_bytes(data)
watching = True
try:
    __import__("this_is_not_a_module")
except ImportError:
    pass
watching = False
assert seen.pop()[0] == "import" and count > 60, count
print("SEEN", seen)
"""


def audited_forgeries(body: Any) -> list[bytes]:
    """Manifests with words in places where words are dangerous."""
    forged = []
    for path in places(body):
        if len(path) > 3 or path[0] in ("state", "spec", "versions", "created", "spec_hash"):
            continue
        changed = copy.deepcopy(body)
        holder = changed
        for key in path[:-1]:
            holder = holder[key]
        holder[path[-1]] = "__import__('os').system('touch /tmp/x')"
        forged.append(envelope(changed))
    return forged


def test_reading_runs_nothing_imports_nothing_and_writes_nothing():
    with memory_folder() as folder:
        save_with_threads(Path(folder), 5, Topology())
        command = [sys.executable, "-c", AUDIT, folder]
        ran = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=200)
    assert ran.returncode == 0, ran.stderr
    assert "SEEN []" in ran.stdout, ran.stdout
