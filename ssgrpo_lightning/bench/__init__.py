"""Measurements, each a command: `python -m ssgrpo_lightning.bench.NAME [--quick] [--out FILE]`.

Figures are ratios of runs interleaved in one process; the last line printed is the headline.
"""
