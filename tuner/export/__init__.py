"""A chosen trial as files to serve with: what `vllm serve --config` takes as it is, and for a group how to start it.

One server is `serve.yaml` and `serve.env`. A group has a pair of those for each role, `start.sh` for one host,
`compose.yaml` for Docker, `kubernetes.yaml`, and `llm-d.values.yaml` for llm-d's Helm chart, all of the same values.
"""

from tuner.export.choice import PICKS, best, pick
from tuner.export.files import serve_env, serve_yaml
from tuner.export.folder import Exported, start_line, write

__all__ = ["PICKS", "Exported", "best", "pick", "serve_env", "serve_yaml", "start_line", "write"]
