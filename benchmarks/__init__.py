"""One file a claim; each prints one JSON object as its last line.

A benchmark that is told to end leaves no broker and no role behind: SIGTERM unwinds it as Ctrl-C does.
"""

import signal
import sys
import threading

if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
