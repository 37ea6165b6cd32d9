"""The colours of the pictures: told apart by colour-blind readers too (Okabe and Ito)."""

BLUE, GREY, GREEN, ORANGE, VERMILION, PURPLE = (
    "#0072b2",
    "#8c8c8c",
    "#009e73",
    "#e69f00",
    "#d55e00",
    "#aa3377",
)
SKY, ROSE, INK = "#56b4e9", "#cc79a7", "#333333"

# Topologies: replicas are cold and PD groups warm, so that the two kinds part at a glance. None is the green
# of the promise. Marker symbols follow, which differ by themselves: Plotly's name, then matplotlib's.
COLD, WARM = (BLUE, SKY, INK), (VERMILION, ORANGE, PURPLE, ROSE)
COLD_SYMBOLS = (("circle", "o"), ("square", "s"))
WARM_SYMBOLS = (("triangle-up", "^"), ("diamond", "D"), ("triangle-down", "v"), ("cross", "P"), ("pentagon", "p"))
