"""What holds for all tests."""

import signal

# A shell that starts the tests with & has it ignored, and what is ignored stays so in every child: no test of Ctrl-C
# would then say anything.
signal.signal(signal.SIGINT, signal.default_int_handler)
