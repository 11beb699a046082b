"""One supervisor per machine, one worker process per core set."""
