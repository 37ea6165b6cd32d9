"""tune: the SLO autotuner for vLLM. The front door is tuner.cli; the map of the rooms is in the README."""

__version__ = "0.1.0"
