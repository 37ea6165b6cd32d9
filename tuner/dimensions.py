"""The dimensions of a search space: ranges, choices and fractions of another argument, as a study writes them."""

import math
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, model_validator


class Part(BaseModel):
    """A part of a study file: typed strictly, no unknown keys, never changed."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, arbitrary_types_allowed=True)


class IntRange(Part):
    """Whole numbers from low to high; on a log scale `grid` points per octave (0: every number)."""

    low: int
    high: int
    log: bool = False
    step: int = Field(default=1, ge=1)
    grid: int | None = Field(default=None, ge=0, le=16)

    @model_validator(mode="before")
    @classmethod
    def _is_range(cls, data: object) -> object:
        if not isinstance(data, Mapping | IntRange):
            raise ValueError(  # noqa: TRY004 (pydantic turns a ValueError into a line of its report)
                f"{data!r} is not a range: write {{low: 512, high: 8192, log: true}} or a list of values; "
                "to fix a value put it under engine_args"
            )
        return data

    @model_validator(mode="after")
    def _ordered(self) -> "IntRange":
        _check_order(self.low, self.high, log=self.log)
        if self.log and self.step != 1:
            raise ValueError("step and log exclude each other; use grid: points per octave")
        return self


class FloatRange(Part):
    """Numbers from low to high."""

    low: float
    high: float
    log: bool = False

    @model_validator(mode="after")
    def _ordered(self) -> "FloatRange":
        _check_order(self.low, self.high, log=self.log)
        return self


class Choice(Part):
    """One of a list of values."""

    values: tuple[bool | int | float | str, ...] = Field(min_length=1)

    @model_validator(mode="before")
    @classmethod
    def _from_list(cls, data: object) -> object:
        return {"values": tuple(data)} if isinstance(data, list | tuple) else data

    @model_validator(mode="after")
    def _distinct(self) -> "Choice":
        if len({(type(v), v) for v in self.values}) != len(self.values):
            raise ValueError("the same value twice")
        return self


class Fraction(Part):
    """A share of another argument, or off (the argument is not given)."""

    fraction_of: str
    low: float = Field(gt=0, le=1)
    high: float = Field(gt=0, le=1)
    off: bool = True

    @model_validator(mode="after")
    def _ordered(self) -> "Fraction":
        _check_order(self.low, self.high, log=True)
        return self


def _check_order(low: float, high: float, *, log: bool) -> None:
    if not (math.isfinite(low) and math.isfinite(high)):
        raise ValueError(f"low {low:g} and high {high:g} must be finite")
    if low >= high:
        raise ValueError(f"low {low:g} must be below high {high:g}; to fix a value put it under engine_args")
    if log and low <= 0:
        raise ValueError(f"a log scale needs low above zero, not {low:g}")


def _dimension_form(value: object) -> str:
    if isinstance(value, Choice | list | tuple):
        return "choice"
    if isinstance(value, Fraction) or (isinstance(value, Mapping) and ("fraction_of" in value or "off" in value)):
        return "fraction"
    if isinstance(value, IntRange | FloatRange):
        return "ints" if isinstance(value, IntRange) else "floats"
    if isinstance(value, Mapping):
        if "values" in value:
            return "choice"
        bounds = (value.get("low"), value.get("high"))
        return "floats" if any(isinstance(bound, float) for bound in bounds) else "ints"
    return "ints"  # which then says what a range looks like


Dimension = Annotated[
    Annotated[IntRange, Tag("ints")]
    | Annotated[FloatRange, Tag("floats")]
    | Annotated[Choice, Tag("choice")]
    | Annotated[Fraction, Tag("fraction")],
    Discriminator(_dimension_form),
]

DEFAULT_SPACE: dict[str, Any] = {
    "max_num_batched_tokens": {"low": 256, "high": 16384, "log": True},
    "long_prefill_token_threshold": {"fraction_of": "max_num_batched_tokens", "low": 0.0625, "high": 0.5},
}
