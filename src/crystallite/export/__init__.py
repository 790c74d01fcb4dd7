"""Models as files that other runtimes read."""
