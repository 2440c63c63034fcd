"""An interpreter that lacks what Windows or macOS lacks: `hide` removes names, modules and /proc.

As a program, ``other_platforms.py PLATFORM FILE [WORD...]`` hides them and runs FILE with these words, or, if FILE
begins with ``contract``, the tests in it.

This is no Windows and no macOS. It shows that the package does not depend on names of Linux, and not that a kernel
behaves as this one. The path syntax, the text of errors, the locks, the signals and the clocks remain those of Linux.

The names are those that typeshed declares for Linux and not for the other platform, and those that only its newer
Pythons have there.
"""

from __future__ import annotations

import builtins
import contextlib
import errno
import importlib
import os
import runpy
import sys
from collections.abc import Callable
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any

OF_LINUX = {
    "os": """CLONE_* EFD_* GRND_* MFD_* O_DIRECT O_LARGEFILE O_NOATIME O_PATH O_RSYNC O_TMPFILE PIDFD_* POSIX_FADV_*
        P_PIDFD RTLD_DEEPBIND RWF_* SCHED_BATCH SCHED_IDLE SCHED_RESET_ON_FORK SPLICE_* ST_NOATIME TFD_* XATTR_*
        copy_file_range eventfd* fdatasync getrandom getresgid getresuid getxattr listxattr memfd_create pidfd_open
        pipe2 posix_fadvise posix_fallocate removexattr sched_get[aps]* sched_rr_get_interval sched_set* setns
        setresgid setresuid setxattr splice timerfd_* unshare""",
    "signal": "SIGCLD SIGPOLL SIGPWR SIGRTMAX SIGRTMIN SIGSTKFLT pidfd_send_signal sigtimedwait sigwaitinfo",
    "select": "EPOLL* POLLMSG POLLRDHUP epoll",
    "socket": "AF_ALG AF_CAN AF_NETLINK AF_PACKET AF_VSOCK MSG_MORE SOCK_CLOEXEC SOCK_NONBLOCK SO_PEERCRED"
    " TCP_QUICKACK TCP_USER_TIMEOUT",
    "time": "CLOCK_BOOTTIME CLOCK_TAI pthread_getcpuclockid",
    "mmap": "MADV_DO* MADV_DONTDUMP MADV_DONTFORK MADV_HUGEPAGE MADV_REMOVE MAP_DENYWRITE MAP_POPULATE MAP_STACK",
    "fcntl": "F_OFD_* F_GETLK64 F_SETLK64 F_SETLKW64 F_NOTIFY F_GETLEASE F_SETLEASE F_*PIPE_SZ F_*SEAL*",
}
OF_POSIX = {
    "os": """CLD_* EX_* F_* NGROUPS_MAX O_ACCMODE O_ASYNC O_CLOEXEC O_DIRECTORY O_DSYNC O_FSYNC O_NDELAY O_NOCTTY
        O_NOFOLLOW O_NONBLOCK O_SYNC POSIX_* PRIO_* P_ALL P_PGID P_PID RTLD_* SCHED_* SEEK_DATA SEEK_HOLE ST_* W[A-Z]*
        chown chroot confstr* ctermid environb fchdir fchmod fchown fork forkpty fpathconf fstatvfs fwalk get_blocking
        get[egp]*id getgrouplist getgroups getloadavg getpgrp getpriority getsid getuid grantpt initgroups killpg
        lchown lockf login_tty major makedev minor mkfifo mknod nice openpty pathconf* posix_* pread* ptsname pwrite*
        readv register_at_fork sched_* sendfile set_blocking set[egpru]*id setgroups setpgrp setpriority setsid
        spawnlp* spawnvp* statvfs sync sysconf* tcgetpgrp tcsetpgrp ttyname uname unlockpt wait wait3 wait4 waitid*
        writev""",
    "signal": """ITIMER_* SIGALRM SIGBUS SIGCHLD SIGCONT SIGHUP SIGIO SIGIOT SIGKILL SIGPIPE SIGPROF SIGQUIT SIGSTOP
        SIGSYS SIGTRAP SIGTSTP SIGTT* SIGURG SIGUSR* SIGVTALRM SIGWINCH SIGXCPU SIGXFSZ SIG_BLOCK SIG_SETMASK
        SIG_UNBLOCK alarm getitimer pause pthread_* setitimer siginterrupt sigpending sigwait""",
    "select": "PIPE_BUF POLL* poll",
    "socket": "AF_UNIX CMSG_* MSG_DONTWAIT MSG_NOSIGNAL SCM_* SO_REUSEPORT recv_fds send_fds sethostname",
    "time": "CLOCK_* clock_* tzset",
    "mmap": "MADV_* MAP_* PROT_*",
}
MODULES_OF_POSIX = "fcntl grp posix pty pwd readline resource syslog termios tty".split()
KEPT = {"getpid", "getppid"}  # which the patterns match

# What others wrote chooses by platform what it imports, and is imported while it finds what it needs.
LOADED_FIRST = """asyncio click concurrent.futures ctypes getpass http.client importlib.metadata logging.handlers
    multiprocessing platform rich.console rich.live rich.table rich.text selectors shutil socket subprocess tempfile
    unittest.mock urllib3 uuid""".split()
TESTS_NEED = ["pytest", "_pytest.pytester"]


def hide(platform: str, *, pytest: bool = False) -> None:
    """Hide from this interpreter what `platform` lacks: ``"win32"`` or ``"darwin"``.

    Args:
        platform: the new value of `sys.platform`.
        pytest: import pytest first, which looks at the platform, too.
    """
    assert not [name for name in sys.modules if name.partition(".")[0] == "fscoord"], "fscoord is imported already"
    for name in [*LOADED_FIRST, *(TESTS_NEED if pytest else ())]:
        with contextlib.suppress(ModuleNotFoundError):  # an extra
            importlib.import_module(name)
    sys.modules["asyncio"].new_event_loop().close()  # since Python 3.14, the first loop imports by platform
    selectors: Any = sys.modules["selectors"]
    selectors.DefaultSelector = selectors.SelectSelector
    sockets: Any = sys.modules["socket"]
    sockets.socketpair = partial(sockets.socketpair, sockets.AF_UNIX)  # for asyncio, which has another one on Windows
    hidden = [OF_LINUX, OF_POSIX] if platform == "win32" else [OF_LINUX]
    for names in hidden:
        for module, patterns in names.items():
            remove(importlib.import_module(module), patterns.split())
    if platform == "win32":
        sys.modules.update(dict.fromkeys(MODULES_OF_POSIX))  # type: ignore[arg-type]  # None: an ImportError
    sys.platform = platform
    hide_proc()


def remove(module: Any, patterns: list[str]) -> None:
    for name in dir(module):
        if name not in KEPT and any(fnmatchcase(name, pattern) for pattern in patterns):
            delattr(module, name)


def hide_proc() -> None:
    """Let no path below /proc be found."""

    def hiding(call: Callable[..., Any]) -> Callable[..., Any]:
        def found(path: Any = ".", *arguments: Any, **named: Any) -> Any:
            if isinstance(path, (str, bytes)) and os.fsdecode(path).startswith("/proc"):
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
            return call(path, *arguments, **named)

        return found

    builtins.open = hiding(open)
    for name in ("listdir", "open", "readlink", "scandir", "stat"):
        setattr(os, name, hiding(getattr(os, name)))


class Collection:
    """Shows pytest the true platform while it looks for tests: on Windows it compares short names of files."""

    def __init__(self, platform: str) -> None:
        self._platform = platform

    def pytest_sessionstart(self) -> None:
        import fscoord.testing

        assert fscoord.testing.StoreContract, "imported as elsewhere"
        sys.platform = "linux"

    def pytest_collection_finish(self) -> None:
        sys.platform = self._platform


def main(platform: str, file: str, *words: str) -> int:
    is_contract = Path(file).name.startswith("contract")
    hide(platform, pytest=is_contract)
    if not is_contract:
        sys.argv = [file, *words]
        runpy.run_path(file, run_name="__main__")
        return 0
    import pytest

    plain = ["--noconftest", "-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", str(Path(file).parent)]
    plain += ["--capture=sys", "--import-mode=importlib", "-q"]
    return int(pytest.main([*plain, file, *words], [Collection(platform)]))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
