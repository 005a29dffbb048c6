"""For tests that start commands in processes of their own."""

# A shell lets what it runs in the background ignore Ctrl-C, and all below it do so too: not those that are to hear it.
HEARING_CTRL_C = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
