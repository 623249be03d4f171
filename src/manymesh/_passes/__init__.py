"""The passes: from the flat program of a traced step to fragments. One pass a file; `_run.PASSES` has their order."""
