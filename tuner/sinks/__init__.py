"""Tell the outside world what was measured: run folder, terminal, MLflow, plots."""
