"""`kvfold report`: what was found of some checkpoints as one HTML page and as pictures.

records.py   the files of a checkpoint's directory, as data
groups.py    which checkpoints may be compared
canvas.py    colours, and matplotlib's figures as SVG and PNG
quality.py runs.py   the figures
tables.py    the tables
sections.py  the page's parts, and the command that measures what is missing
document.py  the HTML file and the PNGs; templates/ has its text, style and script
"""
