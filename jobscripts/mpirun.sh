#!/bin/bash

# A script in any allocation.
# usage: jobscripts/mpirun.sh [options of hpcgpu launch] my_script.py [arguments]
hpcgpu launch --launcher mpirun "$@"
