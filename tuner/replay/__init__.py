"""Send a recorded workload at its recorded times and note what came back, when."""
