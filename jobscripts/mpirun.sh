#!/bin/bash

# usage: jobscripts/mpirun.sh [options of hpcgpu launch] my_script.py [arguments], in any allocation
hpcgpu launch --launcher mpirun "$@"
