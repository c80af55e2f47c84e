#!/bin/sh
# A world of ten small functions: what the task set holds, what the model solves, ten steps of training, what it solves then.
# Run it anywhere, with no server up: `sh examples/taskset/learn.sh`.
set -eu
tasks=$(dirname "$0")/tasks.jsonl

ostinato worlds show "$tasks"
ostinato worlds run "$tasks" --split all --tries 4 --set run.directory=runs/functions
# 0 epochs: draw the tasks without end; four groups of eight attempts make a step
ostinato train --world "$tasks" --steps 10 --set run.directory=runs/functions --set worlds.epochs=0 --set worlds.groups=4 --set worlds.group=8
ostinato worlds run "$tasks" --split held_out --tries 8 --set run.directory=runs/functions # families that it never trained on
