"""Escapes, bombs and cheats: each ends in time, none is accepted, and nothing is left behind."""

import json
import os
import platform
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from ssgrpo_lightning.records import Problem
from ssgrpo_lightning.sandbox import isolation as isolations
from ssgrpo_lightning.sandbox.isolation import (
    BestAvailable,
    Bubblewrap,
    Isolation,
    Namespaces,
    UnsafeSubprocess,
)
from ssgrpo_lightning.sandbox.seccomp import _MACHINES, _REFUSED, system_call_filter
from ssgrpo_lightning.sandbox.session import Launch, Limits, SandboxError
from ssgrpo_lightning.verifiers import PassesTests
from tests.conftest import REPOSITORY

SMALL = Limits(cpu_seconds=1, wall_seconds=3, memory=128, processes=3, output=1, scratch=4)
SAMPLE = str(REPOSITORY / "ssgrpo_lightning/tasks/samples/code_train.jsonl")
UID = 1_999_999_999
LIBC = "import ctypes, errno\nlibc = ctypes.CDLL(None, use_errno=True)\n"

# f(outside) is True where the escape worked: so a verdict of 1 would be a hole. They are also run
# outside, where they must work, or they would show nothing; that is not done with UNCONTROLLED.
ESCAPES = {
    "the password file": "def f(o): return 'root' in open('/etc/passwd').read()",
    "the home folder": "import os\ndef f(o): return set(os.listdir(o['home'])) == set(o['names'])",
    "the tests of the sample": "def f(o): return 'expected' in open(o['sample']).read()",
    "a file outside": "def f(o): return open(o['folder'] + '/secret').read() == 'secret'",
    "a symbolic link out": """
import os
def f(o):
    os.chdir('/tmp')
    os.symlink(o['folder'], f'link{os.getpid()}')
    return open(f'link{os.getpid()}/secret').read() == 'secret'""",
    "the way up": "def f(o): return open('/..' * 20 + o['folder'] + '/secret').read() == 'secret'",
    "a search of the whole tree": """
import os
def f(o): return any('code_train.jsonl' in names for _, _, names in os.walk(o['repository']))""",
    "the environment": "import os\ndef f(o): return 'SANDBOX_SECRET' in os.environ",
    "the command lines": "import os\ndef f(o): return any(map(str.isdigit, os.listdir('/proc')))",
    "a socket, IPv4": "import socket\ndef f(o): return socket.socket().fileno() > 0",
    "a socket, IPv6": """
import socket
def f(o): return socket.socket(socket.AF_INET6, socket.SOCK_DGRAM).fileno() > 0""",
    "a socket, Unix abstract": r"""
import os, socket
def f(o):
    socket.socket(socket.AF_UNIX).bind(f'\0sandbox{os.getpid()}')
    return True""",
    "a socket, netlink": """
import socket
def f(o): return socket.socket(16, socket.SOCK_RAW, 0).fileno() > 0""",
    "a shell": """
import subprocess
def f(o): return subprocess.run(['/bin/sh', '-c', 'true']).returncode == 0""",
    "writing outside": "def f(o): return open(o['folder'] + '/owned', 'w').write('x') == 1",
    "tracing": LIBC + "def f(o): return libc.ptrace(0, 0, 0, 0) == 0",
    "anonymous files": "import os\ndef f(o): return os.memfd_create('x') > 0",
    "shared memory": LIBC + "def f(o): return libc.shmget(0, 4096, 0o1600) >= 0",
    "a descriptor handed down": """
import os
def f(o): return os.fstat(o['descriptor']).st_ino == o['inode']""",
    "signals to the trainer": """
import os
def f(o):
    os.kill(o['trainer'], 0)
    return True""",
}
UNCONTROLLED = {
    "the environment of process 1": "def f(o): return '=' in open('/proc/1/environ').read()",
    "writing to the system": """
import os, sys
def f(o):
    for folder in ('/', '/usr/lib', '/dev', os.path.dirname(os.__file__)):
        try:
            open(folder + '/owned', 'w')
            return True
        except OSError:
            pass""",
    "moving a mount point": "import os\ndef f(o): return os.rename('/tmp', '/x') is None",
    "the memory of the machine": "def f(o): return open('/dev/mem', 'rb').read(1) != b''",
    "a device of one's own": """
import os, stat
def f(o):
    os.mknod('/tmp/sda', 0o600 | stat.S_IFBLK, os.makedev(8, 0))
    return True""",
    "mounting": LIBC + "def f(o): return libc.mount(b't', b'/tmp', b'tmpfs', 0, None) == 0",
    "mounting again, writable": LIBC + "def f(o): return libc.mount(0, b'/', 0, 4128, 0) == 0",
    "unmounting": LIBC + "def f(o): return libc.umount2(b'/tmp', 2) == 0",
    "chroot": "import os\ndef f(o):\n    os.chroot('/tmp')\n    return True",
    "a namespace of one's own": LIBC + "def f(o): return libc.unshare(0x10000000) == 0",
    "the same, by clone": LIBC
    + "def f(o): return libc.syscall(o['clone'], 0x10000011, 0, 0, 0, 0) > -1",
    "another user": "import os\ndef f(o):\n    os.setresuid(4242, 4242, 4242)\n    return True",
    "more memory": """
import resource
def f(o):
    resource.setrlimit(resource.RLIMIT_AS, (-1, -1))
    return True""",
    "killing the sandbox": """
import os, time
def f(o):
    parent = os.getppid()
    os.kill(parent, 9)
    time.sleep(0.2)
    return os.getppid() != parent""",
    "killing everything": """
import os, time
def f(o):
    parent = os.getppid()
    os.kill(-1, 9)
    time.sleep(0.2)
    return os.getppid() != parent""",
    "tracing the sandbox": LIBC
    + "import os\ndef f(o): return libc.ptrace(16, os.getppid(), 0, 0) == 0",
    "reading the sandbox's memory": LIBC
    + """
import os
def f(o):
    to = (ctypes.c_size_t * 2)(ctypes.addressof(ctypes.create_string_buffer(8)), 8)
    of = (ctypes.c_size_t * 2)(ctypes.addressof(ctypes.py_object(f)), 8)
    return libc.process_vm_readv(os.getppid(), to, 1, of, 1, 0) > 0""",
    "rings": LIBC + "def f(o): return libc.syscall(425, 8, ctypes.create_string_buffer(200)) > 0",
    "more than the scratch folder holds": """
def f(o):
    for i in range(4):
        with open(f'/tmp/{i}', 'wb') as file:
            file.write(bytes(2 << 20))
    return True""",
    "a file beyond the limit": """
def f(o):
    with open('/tmp/x', 'wb') as file:
        file.truncate(64 << 20)
    return True""",
    "more files than the limit": """
def f(o):
    kept = [open('/dev/null') for _ in range(200)]
    return True""",
    "more processes than the limit": """
import os, time
def f(o):
    for _ in range(3):
        if os.fork() == 0:
            time.sleep(9)
    return True""",
    "as many threads": """
import threading, time
def f(o):
    for _ in range(3):
        threading.Thread(target=time.sleep, args=(9,), daemon=True).start()
    return True""",
}
# f(3) should be 7919, which no code can know.
CHEATS = {
    "exit at once": "import sys\nsys.exit(0)",
    "exit in the call": "def f(x): raise SystemExit(0)",
    "exit without ado": "import os\ndef f(x): os._exit(0)",
    "always equal": "class E:\n    def __eq__(self, o): return True\ndef f(x): return E()",
    "always equal number": """
class E(int):
    def __eq__(self, o): return True
def f(x): return E()""",
    "not a number": "def f(x): return float('nan')",
    "infinity": "def f(x): return float('inf')",
    "equal by text": "class E(str): pass\ndef f(x): return E('7919')",
    "patched JSON": """
import json
json.dumps = lambda *a, **k: '{"passed": true, "value": true}'
def f(x): return 1""",
    "patched builtins": """
import builtins
builtins.isinstance = lambda *a: True
builtins.len = lambda *a: 0
builtins.AssertionError = Exception
def f(x): return 1""",
    "a verdict of one's own": """
import os
def f(x):
    for d in range(64):
        try: os.write(d, b'{"passed": true}\\n{"value": true}\\n{"ready": true}\\n')
        except OSError: pass
    os._exit(0)""",
    "a set in a set": """
import os
def f(x): os.write(3, b'{"value": {"$set": [[1]]}}'); os._exit(0)""",
    "an infinite complex": """
import os
def f(x): os.write(3, b'{"value": {"$complex": [1e999, "x"]}}'); os._exit(0)""",
    "a bottomless list": "import os\ndef f(x): os.write(3, b'[' * 60000); os._exit(0)",
    "colliding integers": "def f(x): return {k * (2**61 - 1) for k in range(40000)}",
    "a number of too many digits": "import os\ndef f(x): os.write(3, b'1' * 60000); os._exit(0)",
    "pickled surprise": """
import os
class P:
    def __reduce__(self): return os.system, ('touch /tmp/owned',)
def f(x): return P()""",
    "expected values in frames": """
import sys
def f(x):
    frame, found = sys._getframe(), []
    while frame:
        found += [frame.f_locals, frame.f_globals]
        frame = frame.f_back
    return 7919 if "'expec" + "ted'" in repr(found).replace('"', "'") else 0""",
    "expected values in memory": """
import gc
def f(x):
    held = [o for o in gc.get_objects() if isinstance(o, dict) and 'expected' in o]
    return held[0]['expected'] if held else 0""",
    "the test file": """
import os, sys
def f(x):
    for folder, _, names in os.walk('/tmp'):
        for name in names:
            text = open(os.path.join(folder, name)).read()
            if 'expected' in text: return 7919
    return 7919 if 'expected": 7' in ' '.join(sys.orig_argv) else 0""",
    "a property of the class": "class Solution:\n    f = property(lambda self: 7919 and None)",
    "not there": "g = 1",
    "not callable": "f = 7919",
    "no Python": "def f(x) return 7919",
    "null bytes": "def f(x): return 1 \0",
    "surrogates": "def f(x): return '\ud800'",
    "text that runs backwards": "def f(x): return '\u202e9197'",
    "an error that hides": """
class E(Exception):
    def __str__(self): raise self
def f(x): raise E""",
    "its own death": "import os, signal\ndef f(x): os.kill(os.getpid(), signal.SIGSEGV)",
    "closed descriptors": "import os\ndef f(x):\n    os.closerange(0, 64)\n    return 1",
}
BOMBS = {
    "fork bomb": """
import os
def f(x):
    while True:
        try: os.fork()
        except OSError: pass""",
    "thread bomb": """
import threading
def f(x):
    def more():
        while True:
            try: threading.Thread(target=more).start()
            except RuntimeError: pass
    more()""",
    "memory bomb": "def f(x):\n    kept = []\n    while True: kept.append(bytearray(1 << 20))",
    "one large block": "def f(x): return len(bytearray(1 << 40))",
    "memory of many": """
import os
def f(x):
    for _ in range(3): os.fork()
    kept = []
    while True:
        try: kept.append(bytearray(1 << 20))
        except MemoryError: pass""",
    "infinite loop": "def f(x):\n    while True: pass",
    "loop that catches everything": """
import signal
for s in range(1, 65):
    try: signal.signal(s, signal.SIG_IGN)
    except (OSError, ValueError): pass
def f(x):
    while True:
        try:
            while True: pass
        except BaseException: pass""",
    "sleep": "import time\ndef f(x): time.sleep(1000)",
    "long answer": "def f(x): return 'x' * (30 << 20)",
    "endless answer": "import os\ndef f(x):\n    while True: os.write(3, b'1' * 65536)",
    "flood of prints": "def f(x):\n    while True: print('x' * 1000)",
    "flood of errors": "import sys\ndef f(x):\n    while True: sys.stderr.write('x' * 1000)",
    "deep recursion": "import sys\nsys.setrecursionlimit(10**9)\ndef f(x): return f(x)",
    "deep list": "def f(x):\n    a = []\n    for _ in range(10**6): a = [a]\n    return a",
    "list that holds itself": "def f(x):\n    a = []\n    a.append(a)\n    return a",
    "large number": "def f(x): return 10 ** 10 ** 9",
    "number of many digits": "def f(x): return 10 ** 10000",
    "deep parentheses": "f = " + "(" * 100_000,
    "long source": "x = 1\n" * 200_000 + "def f(x): return 1",
    "slow pattern": "import re\ndef f(x): return re.match('(a+)+$', 'a' * 60 + 'b')",
    "many small files": "def f(x):\n    for i in range(10**6): open(f'/tmp/{i}', 'w').close()",
    "daemon that outlives": """
import os, time
def f(x):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0: time.sleep(1000)
        os._exit(0)
    return 1""",
    "daemon that holds the channel": """
import os, time
def f(x):
    if os.fork() == 0:
        while True: os.write(3, b' ')
    os._exit(0)""",
    "work after the end": """
import atexit
@atexit.register
def more():
    while True: pass
def f(x): return 1""",
}


@pytest.fixture(params=[Namespaces(), Bubblewrap()], ids=lambda i: type(i).__name__)
def verifier(request, monkeypatch):
    refusal = request.param.refusal()
    if refusal is not None:  # a tool that is missing is no failure, a sandbox that leaks is one
        assert "does not hold" not in refusal
        pytest.skip(refusal)
    if os.geteuid() == 0:
        monkeypatch.setattr(isolations, "_fresh_uid", lambda: UID)
    yield PassesTests(isolation=request.param, limits=SMALL)
    if os.geteuid() == 0:  # whatever the sandbox started has this user
        assert [p for p in Path("/proc").glob("[0-9]*") if _belongs(p)] == []


def _belongs(process: Path) -> bool:
    try:
        dead = process.joinpath("stat").read_text().rpartition(")")[2].split()[0] == "Z"
        return process.stat().st_uid == UID and not dead
    except (FileNotFoundError, ProcessLookupError):
        return False


def call(expected, argument):
    tests = [{"call": "f", "args": [argument], "expected": expected}]
    return Problem(0, "p", json.dumps({"tests": tests}))


@pytest.fixture
def outside(tmp_path, monkeypatch):
    """What an escape may look for."""
    monkeypatch.setenv("SANDBOX_SECRET", "secret")
    (tmp_path / "secret").write_text("secret")
    home = os.path.expanduser("~")
    with (tmp_path / "secret").open() as file:
        os.set_inheritable(file.fileno(), True)
        high = os.dup2(file.fileno(), 50)
        yield {
            "folder": str(tmp_path),
            "home": home,
            "names": os.listdir(home),
            "sample": SAMPLE,
            "repository": str(REPOSITORY),
            "trainer": os.getpid(),
            "descriptor": high,
            "inode": os.fstat(high).st_ino,
            "clone": _MACHINES[platform.machine()][2],
        }
        os.close(high)


@pytest.mark.parametrize("name", [*ESCAPES, *UNCONTROLLED])
def test_no_escape_works(name, verifier, outside):
    start = time.monotonic()
    verdict = verifier({**ESCAPES, **UNCONTROLLED}[name], call(True, outside))
    assert verdict.reward == 0, verdict
    assert "took too long" not in verdict.reason
    assert time.monotonic() - start < 20
    assert sorted(os.listdir(outside["folder"])) == ["secret"]


@pytest.mark.parametrize("name", ESCAPES)
def test_the_same_code_works_outside(name, outside):
    code = f"{ESCAPES[name]}\nimport sys, json\nsys.exit(f(json.loads(sys.argv[1])) is not True)"
    subprocess.run(
        [sys.executable, "-c", code, json.dumps(outside)],
        check=True,
        close_fds=False,
        cwd=outside["folder"],
        timeout=60,
    )


@pytest.mark.parametrize("name", CHEATS)
def test_no_cheat_is_accepted(name, verifier):
    verdict = verifier(CHEATS[name], call(7919, 3))
    assert verdict.reward == 0, verdict


@pytest.mark.parametrize("name", CHEATS)
def test_no_cheat_passes_a_test_program(name, verifier):
    test = {"program": "assert f(3) == 7919", "calls": ["f"]}
    verdict = verifier(CHEATS[name], Problem(0, "p", json.dumps({"tests": [test]})))
    assert verdict.reward == 0, verdict


@pytest.mark.parametrize("name", BOMBS)
def test_bombs_end_in_time(name, verifier):
    start = time.monotonic()
    verdict = verifier(BOMBS[name], call(7919, 3))
    assert verdict.reward == 0, verdict
    # A test's own limit, and what a busy machine takes to start and to end it.
    assert time.monotonic() - start < SMALL.wall_seconds + 15


@pytest.mark.parametrize(
    "code",
    ["while True: print('x' * 1000)", "import sys\nprint(3)\nsys.exit(1)", "print(input())", "1/0"],
)
def test_programs_that_print_something_else_fail(code, verifier):
    tests = [{"stdin": "3\n", "stdout": "7919\n"}]
    assert verifier(code, Problem(0, "p", json.dumps({"tests": tests}))).reward == 0


def test_every_refused_system_call_is_refused(verifier):
    column = _MACHINES[platform.machine()][0]
    numbers = [n[column] for n in _REFUSED.values()]
    code = LIBC + (
        "def f(numbers):\n"
        "    return [(libc.syscall(n, -1, -1, -1, -1, -1), ctypes.get_errno()) for n in numbers]"
    )
    assert verifier(code, call([[-1, 1]] * len(numbers), numbers)).reward == 1
    new = [424, 425, 435, 442, 447, 1000, 0x40000000]
    assert verifier(code, call([[-1, 38]] * len(new), new)).reward == 1


def test_what_follows_a_bomb_is_judged_as_if_it_had_not_been(verifier):
    code = "import os\ndef f(x):\n    while x: os.fork()\n    return 7"
    tests = [{"call": "f", "args": [x], "expected": 7} for x in (0, 1, 0)]
    verdict = PassesTests(True, verifier.isolation, SMALL)(
        code, Problem(0, "p", json.dumps({"tests": tests}))
    )
    assert verdict.reward == pytest.approx(2 / 3)


def test_time_for_all_tests_ends_them(verifier):
    tests = [{"call": "f", "args": [3], "expected": 7}] * 50
    start = time.monotonic()
    verdict = PassesTests(True, verifier.isolation, SMALL, total_seconds=1.0)(
        "import time\ndef f(x):\n    time.sleep(1)\n    return 7",
        Problem(0, "p", json.dumps({"tests": tests})),
    )
    assert 0 < verdict.reward < 0.2 and time.monotonic() - start < 20


@contextmanager
def _never():
    yield Launch([sys.executable, "-c", "raise SystemError('no room')"])


class Broken(Isolation):
    def launch(self, limits):
        return _never()

    def refusal(self):
        return None


def test_a_sandbox_that_fails_gives_no_verdict():
    verdict = PassesTests(isolation=Broken())("def f(x): return 1", call(1, 1))
    assert verdict.reward is None and "no room" in verdict.reason


def test_a_trial_finds_a_sandbox_that_does_not_hold():
    class Leaky(UnsafeSubprocess):
        refusal = Isolation.refusal

    refusal = Leaky().refusal()
    assert refusal is not None and "files of the machine are in sight" in refusal


def test_without_isolation_it_refuses_and_names_the_way_out(monkeypatch):
    isolations._trial.cache_clear()
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ValueError, match=r"bwrap is not installed.*set isolation to UnsafeSub"):
        PassesTests()
    assert BestAvailable().refusal() is not None
    isolations._trial.cache_clear()


def test_who_opts_in_by_name_gets_a_plain_process(tmp_path):
    verifier = PassesTests(isolation=UnsafeSubprocess())
    assert verifier("def f(x): return open('/etc/passwd').read() > ''", call(True, 1)).reward == 1
    assert verifier("def f(x):\n    while True: pass", call(True, 1)).reward == 0


def test_the_filter_knows_two_machines_and_no_other():
    assert len(system_call_filter("x86_64")) == len(system_call_filter("aarch64"))
    with pytest.raises(ValueError, match="this machine is riscv64"):
        system_call_filter("riscv64")


@pytest.mark.parametrize("field", ["memory", "cpu_seconds", "wall_seconds", "processes"])
def test_limits_of_nothing_are_refused(field):
    with pytest.raises(ValueError, match=f"Limits.{field} is 0"):
        Limits(**{field: 0})


def test_a_session_that_says_nonsense_is_given_up():
    @contextmanager
    def launch():
        yield Launch([sys.executable, "-c", "print('hello', flush=True); input()"])

    class Chatty(Broken):
        def launch(self, limits):
            return launch()

    with pytest.raises(SandboxError, match="not JSON"), Chatty().open(SMALL, "serve"):
        pass
