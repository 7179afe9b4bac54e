# SPDX-License-Identifier: Apache-2.0
"""The end of a process whose program fails while others of the job go on.

At exit JAX waits for all processes, for minutes if need be. But after a failure the
others may never come: they wait for this one in an exchange, or have work for hours.
"""

import atexit
import contextlib
import functools
import logging
import os
import signal
import sys
import threading
from types import CodeType

import jax

_logger = logging.getLogger("jax_ulysses")

# JAX aborts the others as soon as process 0 has gone. When all fail for one reason, as
# they do where the program is wrong, this lets each of them say so.
_PATIENCE_S = 3.0
# Statuses of a program that was asked to stop. The others were asked too, and may need
# longer, to save what they have.
_STOPPED = {128 + number for number in (signal.SIGINT, signal.SIGTERM)}


@functools.cache
def leave_soon_on_failure() -> None:
    """From now on, an uncaught exception ends this process within seconds.

    So does an exit with a nonzero status, unless it says that the program was asked to
    stop (130, 143). ``KeyboardInterrupt`` is no failure either. Python has printed the
    traceback and called what was registered with ``atexit`` since; what was registered
    before is not called. Nothing changes for a program that ends well.
    """
    frame = sys._current_frames()[threading.main_thread().ident or 0]
    while frame.f_back is not None:
        frame = frame.f_back
    end = _End(frame.f_code)
    monitoring = sys.monitoring
    free = [tool for tool in (4, 3) if monitoring.get_tool(tool) is None]
    if not free:
        _logger.warning("sys.monitoring is in use: after a failure JAX's exit waits")
        return
    event = monitoring.events.PY_UNWIND
    monitoring.use_tool_id(free[0], "jax_ulysses")
    monitoring.register_callback(free[0], event, end.on_unwind)
    monitoring.set_events(free[0], event)
    # Last in, first out: it runs before JAX's own.
    atexit.register(end.leave)


class _End:
    """How the program ends.

    What counts is the exception that leaves the outermost frame: ``sys.excepthook``
    does not see ``SystemExit``, and who calls ``sys.exit`` may catch it.

    Args:
      program: code of that frame.
    """

    def __init__(self, program: CodeType):
        self._program = program
        # 0 until it has failed.
        self._status = 0
        self._at_exit = threading.Event()
        self._others = threading.Thread(target=self._meet_others, daemon=True)

    def on_unwind(self, code: CodeType, _offset: int, error: BaseException) -> None:
        """An exception leaves a frame."""
        if code is not self._program:
            return
        self._status = _status_of(error)
        if self._status:
            # At exit no thread can be started any more; now there may be too many.
            with contextlib.suppress(RuntimeError):
                self._others.start()

    def leave(self) -> None:
        """Ends the process if the program has failed."""
        if not self._status:
            return
        self._at_exit.set()
        if self._others.is_alive():
            self._others.join(_PATIENCE_S)
        logging.shutdown()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        os._exit(self._status)

    def _meet_others(self) -> None:
        self._at_exit.wait()
        # How this process ends is known, however the others fare.
        with contextlib.suppress(Exception):
            jax.distributed.shutdown()


def _status_of(error: BaseException) -> int:
    """The exit status to leave with soon; 0 for an ordinary end."""
    if isinstance(error, KeyboardInterrupt):
        return 0
    if not isinstance(error, SystemExit):
        return 1
    code = 0 if error.code is None else error.code
    if not isinstance(code, int):
        return 1
    return 0 if code in _STOPPED else code
