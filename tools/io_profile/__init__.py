"""Parts of `profile_io.py`.

What is asked: `arguments`, `places` (the directories), `effort` (how long), `grid` (which settings). How it is measured:
`session` (the order of everything), `fio`, `copies` (host and GPU). What came out: `spread`, `results`,
`tables`, `picture`, `report`. What follows from it: `advice` (the settings), `config_file` (writing them), `model`,
`compute` and `training` (what it means for a step). `program` puts it together.
"""
