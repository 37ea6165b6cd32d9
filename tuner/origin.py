"""What a run began with, in a form that survives on disk: `plan.json` of a run folder.

A run that goes on must be the same study on the same rows with the same vLLM, in the same storage.
"""

import hashlib
import json
import re
import uuid
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from tuner import spec as specs
from tuner.outside import without_secret
from tuner.results import config_from_json, config_to_json
from tuner.serving import Json, ServingConfig
from tuner.spec import Budget, StudySpec
from tuner.workload import Workload

SQLITE = "sqlite:///"
WITH_USER = re.compile(r"(?P<scheme>[\w+.-]+)://(?P<user>.*)@(?P<host>[^@]*)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Address:
    """Where something is, without a password.

    Attributes:
        text: the address; None for the one inside or beside the run folder, "off" for nowhere.
        lacks_password: it carried one, which was not written down.
    """

    text: str | None
    lacks_password: bool = False

    @classmethod
    def of(cls, text: str | None) -> Self:
        """Return what may be written down of an address; a file's by its whole path."""
        if text is not None and text.startswith(SQLITE) and not text.startswith(f"{SQLITE}/"):
            text = f"{SQLITE}{Path(text.removeprefix(SQLITE)).resolve()}"
        if text is None or (parts := WITH_USER.fullmatch(text)) is None:
            kept = text and without_secret(text)
        elif parts["scheme"].startswith("http") or re.search(":|%3a", parts["user"], re.IGNORECASE):
            kept = without_secret(f"{parts['scheme']}://{parts['host']}")
        else:  # the user alone of a database is no secret
            query = without_secret(f"{parts['scheme']}://{parts['host']}").partition("://")[2]
            kept = f"{parts['scheme']}://{parts['user']}@{query}"
        return cls(kept, lacks_password=kept != text)


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """What a run began with.

    Attributes:
        uid: identifies the study for ever, in Optuna's storage and in MLflow.
        study_name: under which the storage knows it.
        study: what identifies the study file, its budget aside.
        source: the study file as the user named it.
        baseline: the user's present configuration, or None.
        workload: name, sha256 and transforms of what is replayed.
        rows: digest of the run folder's own copy of it.
        vllm_version: of the program that serves, when known.
        host: what vLLM resolved its defaults to.
        storage, mlflow: where they are.
    """

    uid: str
    study_name: str
    study: str
    source: str
    baseline: ServingConfig | None
    workload: Mapping[str, Any]
    rows: str
    vllm_version: str | None
    host: Mapping[str, Json]
    storage: Address
    mlflow: Address


def new_uid() -> str:
    """Return an identity that no other study has."""
    return uuid.uuid4().hex[:16]


def digest_of_study(spec: StudySpec) -> str:
    """Return what identifies a study whose budget may still be extended."""
    fixed = spec.model_copy(update={"budget": Budget(trials=1)})
    return hashlib.sha256(specs.dump(fixed).encode()).hexdigest()


def digest_of_rows(files: Mapping[str, bytes]) -> str:
    """Return what identifies the files of a workload."""
    digest = hashlib.sha256()
    for name, data in sorted(files.items()):
        digest.update(f"{name}\0{len(data)}\0".encode() + data)
    return digest.hexdigest()


def facts_of(workload: Workload) -> dict[str, Any]:
    """Return what is told of a workload wherever a result is."""
    return {"name": workload.name, "sha256": workload.sha256, "transforms": list(workload.transforms)}


def to_json(origin: Origin) -> dict[str, Any]:
    """Return plain data for `plan.json`."""
    plain = {name: getattr(origin, name) for name in Origin.__dataclass_fields__}
    return plain | {
        "baseline": origin.baseline and config_to_json(origin.baseline), "host": dict(origin.host),
        "storage": asdict(origin.storage), "mlflow": asdict(origin.mlflow),
    }  # fmt: skip


def from_json(text: str) -> Origin:
    """Return what `to_json` gave.

    Raises:
        ValueError, KeyError, TypeError: the text is not such data.
    """
    data = json.loads(text)
    if not re.fullmatch(r"[0-9a-f]{16}", data["uid"]):
        raise ValueError(f"{data['uid']!r} is no uid of a study")
    given = {name: data[name] for name in Origin.__dataclass_fields__}
    told = data["workload"]
    workload = {"name": str(told["name"]), "sha256": str(told["sha256"]), "transforms": [*map(str, told["transforms"])]}
    return Origin(**given | {
        "baseline": None if data["baseline"] is None else config_from_json(data["baseline"]), "workload": workload,
        "storage": _address(data["storage"]), "mlflow": _address(data["mlflow"]),
    })  # fmt: skip


def _address(data: Mapping[str, Any]) -> Address:
    text = data["text"]
    if text is not None and not isinstance(text, str):
        raise TypeError(f"{text!r} is no address")
    return Address(text, lacks_password=bool(data["lacks_password"]))
