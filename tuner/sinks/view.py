"""The saved view of MLflow's runs page on which a study is reviewed, and the way there."""

import base64
import json
import shlex
import zlib
from collections.abc import Sequence
from typing import Any

from tuner.outside import without_secret
from tuner.results import TrialResult
from tuner.sinks import pages
from tuner.sinks.topologies import TRANSFER
from tuner.sinks.words import plain
from tuner.spec import StudySpec

MOST_VARIED = 6
REDUNDANT = ("pd_ratio", "topology.kind")  # beside the topology itself


def saved_view(spec: StudySpec, results: Sequence[TrialResult], uid: str) -> str:
    """Return the value of the experiment tag that is a saved view of the runs page.

    The format is the UI's own (seen in MLflow 3.17): best effort, looked at in tests/test_mlflow_browser.py.
    """
    x, y = (pages.metric_key(name) for name in spec.objective_metrics)
    varied = _varied(spec, results)
    wanted = {"tune.study_uid": f"= '{uid}'", "tune.kind": "= 'trial'", "tune.outcome": "!= 'same_as'"}
    transfers = [pages.metric_key(TRANSFER)] if any(r.config.topology.is_pd for r in results) else []
    shown = ("slo", "pareto", "recommended", "role", "failure")
    state = {
        "searchFilter": " AND ".join(f"tags.`{name}` {condition}" for name, condition in wanted.items()),
        "orderByKey": f"metrics.`{y}`",
        "orderByAsc": True,
        "selectedColumns": [
            *(f"params.`{name}`" for name in varied),
            *(f"metrics.`{name}`" for name in (x, y)),
            *(f"metrics.`{name}`" for name in transfers),
            *(f"tags.`tune.{name}`" for name in shown),
        ],
        "compareRunCharts": _charts(x, y, varied),
        "compareRunSections": [
            {"uuid": "tune", "name": "TTFT against ITL", "display": True, "isReordered": True, "columns": 2}
        ],
        "isAccordionReordered": True,
        "hideEmptyCharts": True,
        "runsHiddenMode": "SHOWALL",
    }
    packed = base64.b64encode(zlib.compress(json.dumps(state).encode())).decode()
    created = pages.stamp(min((r.started for r in results), default=0.0))
    name = plain(f"Pareto review: {spec.name}")
    return json.dumps({"name": name, "createdAt": created, "updatedAt": created, "state": f"deflate;{packed}"})


def _varied(spec: StudySpec, results: Sequence[TrialResult]) -> list[str]:
    """The params in which trials differ, topology first when there are several."""
    by_name: dict[str, set[str]] = {}
    for own in pages.params_of_all(results, share_devices=spec.share_devices).values():
        for name, value in own.items():
            by_name.setdefault(name, set()).update({value} - {pages.NOT_GIVEN})
    first = [pages.key(name) for name in ("topology", *spec.search_space) if len(by_name.get(pages.key(name), ())) > 1]
    rest = [name for name, values in by_name.items() if len(values) > 1 and name not in {*first, *REDUNDANT}]
    return [*first, *rest][:MOST_VARIED]


def _charts(x: str, y: str, varied: Sequence[str]) -> list[dict[str, Any]]:
    base = {"deleted": False, "isGenerated": False, "metricSectionId": "tune", "runsCountToCompare": 100}
    axes = {"xaxis": {"key": x, "type": "METRIC"}, "yaxis": {"key": y, "type": "METRIC"}}
    lines = {"selectedParams": list(varied), "selectedMetrics": [x, y], "showAllRuns": False}
    return [
        base | {"type": "SCATTER", "uuid": "tune-scatter", "displayName": "TTFT against ITL"} | axes,
        base | {"type": "PARALLEL", "uuid": "tune-parallel", "displayName": "Arguments to latencies"} | lines,
    ]


def fragment(experiment_id: str, view_key: str) -> str:
    """Return the address of the saved view inside the UI."""
    return f"#/experiments/{experiment_id}/runs?workflowType=machine_learning&viewStateShareKey={view_key}"


def review_url(base: str, experiment_id: str, view_key: str) -> str:
    """Return the address of the saved view in the UI at `base`."""
    return f"{base.rstrip('/')}/{fragment(experiment_id, view_key)}"


def open_ui_hint(tracking_uri: str, url: str | None, program: str = "mlflow") -> str:
    """Return what to type to open the UI on this store, and the address to look at."""
    if tracking_uri.startswith("http"):
        return url or without_secret(tracking_uri)
    lines = [] if pages.has_ui() else ["pip install 'vllm-slo-tuner[ui]'"]
    command = f"{program} ui --backend-store-uri {shlex.quote(without_secret(tracking_uri))}"
    lines.append(f"MLFLOW_SERVER_ENABLE_JOB_EXECUTION=false {command}")  # without it: 11 processes, 2.6 GB
    return "\n".join(lines + ([url] if url else []))
