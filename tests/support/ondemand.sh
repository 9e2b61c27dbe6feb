#!/bin/bash
# A session's job as Open OnDemand runs it (OSC/ood_core 2026-08: BatchConnect::Template#bash_helpers and #base_script).
# bash ondemand.sh HPCGPU ...: the program of the form, in no allocation. Prints the card's port and password.
if [ $# -gt 1 ]; then
  [ "$2" != launch ] || set -- "$1" launch --launcher mpirun "${@:3}"
  exec "$@"
fi
find_port () { python -c 'import socket; s = socket.create_server(("", 0)); print(s.getsockname()[1])'; }
create_passwd () { tr -cd a-zA-Z0-9 < /dev/urandom | head -c"$1"; }
port_used () { (: < "/dev/tcp/localhost/${1#*:}") 2> /dev/null; }
clean_up () { [[ ${SCRIPT_PID} ]] && pkill -P "${SCRIPT_PID}"; exit "${1:-0}"; }
host=localhost
export host port
source ./before.sh
./script.sh &
SCRIPT_PID=$!
source ./after.sh
echo "$port $password"
wait ${SCRIPT_PID} || clean_up 1
