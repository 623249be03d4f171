"""From a program to a running step: instructions, executables, the executor."""
