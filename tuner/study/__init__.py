"""Ask Optuna for configurations, tell it what was measured, and give the verdict."""
