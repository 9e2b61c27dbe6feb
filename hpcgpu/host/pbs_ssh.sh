#!/bin/sh
# What mpirun takes for an ssh, in a job of PBS: sites have none between nodes. Launchers send one shell line, and
# pbs_tmrsh runs an argv without a shell (as the agent itself it fails with 254, usage; OpenPBS 23.06.06). Open MPI
# writes the line for the user's login shell: "set path=..." for csh (5.0.11).
while [ "${1#-}" != "$1" ]; do
    [ "$1" = -l ] && shift
    shift
done
node=$1
shift
# Open MPI's daemons start others of their kind, and have the PATH of a task: /bin:/usr/bin
program=$(command -v pbs_tmrsh) || program=$(. "${PBS_CONF_FILE:-/etc/pbs.conf}" && echo "$PBS_EXEC/bin/pbs_tmrsh")
shell=$(getent passwd "$(id -u)" | cut -d : -f 7)
case $shell in
    */csh | */tcsh) exec "$program" "$node" "$shell" -f -c "$*" ;;
    *) exec "$program" "$node" /bin/sh -c "$*" ;;
esac
