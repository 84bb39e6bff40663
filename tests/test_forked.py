"""Programs that fork from a server are as programs that are started."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.support.forked import Program, Server

SHOW = """
import json, os, sys
print(json.dumps([sys.argv, __name__, os.getcwd(), os.environ.get("A"), os.getsid(0) == os.getpid(),
                  os.umask(0), sorted(map(int, os.listdir("/proc/self/fd")))]))
print("to the other", file=sys.stderr)
sys.exit(7)
"""


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    made = Server(["json"])
    yield made
    made.close()


def test_a_fork_is_as_a_process_of_its_own(server, tmp_path):
    command = [sys.executable, "-c", SHOW, "word"]
    options = {"cwd": tmp_path, "env": {**os.environ, "A": "ü"}}
    forked = server.run(command, timeout=60, **options)
    started = subprocess.run(command, capture_output=True, text=True, check=False, **options)
    assert forked.returncode == started.returncode == 7
    assert json.loads(forked.stdout) == json.loads(started.stdout)
    assert forked.stderr == started.stderr


def test_files_and_modules_are_run_with_their_words(server, tmp_path):
    (tmp_path / "beside.py").write_text("name = 'beside'\n")
    file = tmp_path / "program.py"
    file.write_text("import sys, beside\nprint(__name__, beside.name, sys.argv[1:])\n")
    expected = "__main__ beside ['x']\n"
    assert server.run([sys.executable, str(file), "x"], timeout=60).stdout == expected
    words = [sys.executable, "-m", "program", "x"]
    assert server.run(words, timeout=60, cwd=tmp_path).stdout == expected


def test_an_error_is_a_traceback_and_1(server):
    ended = server.run([sys.executable, "-c", "1 / 0"], timeout=60)
    assert ended.returncode == 1
    assert ended.stderr.splitlines()[-1] == "ZeroDivisionError: division by zero"


def test_file_descriptors_keep_their_numbers(server):
    reads, writes = os.pipe()
    code = f"import os; os.write({writes}, b'here'); os.close({writes})"
    program = server.popen([sys.executable, "-c", code], pass_fds=[writes])
    os.close(writes)
    assert os.read(reads, 100) == b"here"
    assert os.read(reads, 100) == b"", "nobody else holds the pipe"
    os.close(reads)
    assert program.wait(60) == 0


def test_signals_reach_the_program_and_the_server_goes_on(server):
    waits = [sys.executable, "-c", "import time; time.sleep(100)"]
    program = server.popen(waits, start_new_session=True)
    assert isinstance(program, Program)
    assert os.getsid(program.pid) == program.pid
    assert program.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        program.wait(0.01)
    program.terminate()
    assert program.wait(60) == -signal.SIGTERM
    program.kill()  # of a program that has ended: nothing
    assert server.run([sys.executable, "-c", "print(1)"], timeout=60).stdout == "1\n"


def test_what_counts_at_the_start_of_an_interpreter_gets_one(server):
    code = "import sys; sys.exit(sys.flags.utf8_mode + 10)"
    program = server.popen([sys.executable, "-c", code], env={**os.environ, "PYTHONUTF8": "1"})
    assert isinstance(program, subprocess.Popen)
    assert program.wait(60) == 11
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (12345, hard))
    try:
        assert not server.forks(os.environ)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert server.forks(os.environ)
