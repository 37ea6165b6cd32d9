"""The colours of the pictures: told apart by colour-blind readers too (Okabe and Ito)."""

BLUE, GREY, GREEN, ORANGE, VERMILION, PURPLE = (
    "#0072b2",
    "#8c8c8c",
    "#009e73",
    "#e69f00",
    "#d55e00",
    "#aa3377",
)
