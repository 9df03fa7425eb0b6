"""What a run costs, known before it is started: memory of a rank, time of a step, and which settings fit.

`shape.py` a model's sizes, `setting.py` one way to run a recipe, `memory.py` bytes, `times.py` seconds, `constants.py`
what a kind of GPU does, `candidates.py` every way to use the GPUs, `scaling.py` rings of 8 to 128. `docs/planning.md`
says what is assumed.
"""
