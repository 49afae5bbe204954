"""Okabe and Ito's colors, distinct for people with any common color blindness."""

BLUE, ORANGE, GREEN, PINK = "#0072B2", "#E69F00", "#009E73", "#CC79A7"
SKY, VERMILION, GRAY, BROWN = "#56B4E9", "#D55E00", "#7F7F7F", "#8C6D31"
