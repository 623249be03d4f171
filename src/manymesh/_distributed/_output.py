"""Where the lines of all processes go, and what becomes of them when nobody takes them any more."""

from __future__ import annotations

import signal
import threading
from typing import IO

# The exit code where what is printed cannot be written, as on a full disk: EX_IOERR.
UNWRITABLE = 74


class Output:
    """A stream that several threads write lines to. What it cannot write it drops, and keeps the first error.

    Attributes:
      error: why nothing can be written any more; None where all is well.
    """

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream
        self._encoding: str = getattr(stream, "encoding", None) or "utf-8"
        self._writing = threading.Lock()
        self.error: Exception | None = None

    def line(self, text: str) -> None:
        """Writes a line; a character that the stream has no code for becomes a question mark."""
        with self._writing:
            if self.error is not None:
                return
            try:
                self._stream.write(text.encode(self._encoding, "replace").decode(self._encoding) + "\n")
                self._stream.flush()
            except Exception as error:  # a full disk, a reader that is gone, a closed stream: whatever this one raises
                self.error = error

    @property
    def code(self) -> int:
        """The exit code for an error: where the reader is gone, as after SIGPIPE."""
        return 128 + signal.SIGPIPE if isinstance(self.error, BrokenPipeError) else UNWRITABLE
