#!/bin/bash
# usage: entrypoint.sh slurmctld|slurmd|slurmdbd|<any command>
set -e
# Labs beside each other have networks of their own.
for conf in "$(dirname "$0")"/conf/*.conf; do
  sed "s/10\.77\.0\./10.77.${HPCGPU_LAB:-0}./" "$conf" > "/etc/slurm/${conf##*/}"
done
# sid's Slurm is built without PMIx: none is Slurm's own default.
find /usr/lib/*/slurm*/ -name mpi_pmix.so | grep -q . || sed -i 's/^MpiDefault=.*/MpiDefault=none/' /etc/slurm/slurm.conf
# Slurm 24.11.5 takes healthy nodes for down, too, where this is shorter than the ping of a silent one (21 s); .6 does not
case "$(sinfo -V 2> /dev/null)" in
  *" 24.11."[0-5]) sed -i 's/^SlurmdTimeout=.*/SlurmdTimeout=40/' /etc/slurm/slurm.conf ;;
esac
install -d -o munge -g munge -m 755 /run/munge
install -d -o slurm -g slurm /run/slurm /var/log/slurm /var/spool/slurmctld
# One munge key for the cluster: the first container makes it, all share the volume.
if [ ! -s /secret/munge.key ]; then
  (
    umask 077
    key=$(mktemp /secret/.k.XXXXXX)
    head -c 1024 /dev/urandom > "$key"
    ln "$key" /secret/munge.key 2> /dev/null || true # ln is atomic: one winner
    rm -f "$key"
  )
fi
install -o munge -g munge -m 400 /secret/munge.key /etc/munge/munge.key
rm -f /run/munge/munge.socket* /run/munge/munged.pid
chmod 755 / # munged wants it so when it starts
runuser -u munge -- /usr/sbin/munged
# Where its group has no rights the kernel asks for no ACL of / each time that somebody opens a path: four of five requests
# to fuse-overlayfs were that, and Python's imports took 0.7 s instead of 0.4.
chmod 705 /
# Open MPI 6.0.0rc2 (sid's) finds no way between two nodes as long as it may take lo, too.
! grep -qs sid /etc/debian_version || echo btl_tcp_if_include = eth0 >> /etc/openmpi/openmpi-mca-params.conf
if [ "${ACCOUNTING:-}" = 1 ]; then
  cat /etc/slurm/accounting.conf >> /etc/slurm/slurm.conf
fi
case "$1" in
  slurmctld)
    # A first start without its slurmdbd is fatal: wait for the port.
    if [ "${ACCOUNTING:-}" = 1 ]; then
      for _ in $(seq 120); do (: < /dev/tcp/10.77.${HPCGPU_LAB:-0}.3/6819) 2> /dev/null && break; sleep 0.5; done
    fi
    exec slurmctld -D
    ;;
  slurmd)
    # Devices that can be opened and do nothing: with a count and no File= Slurm 22.05 drains the node.
    for i in 0 1 2 3; do [ -e /dev/fakegpu$i ] || mknod -m 666 /dev/fakegpu$i c 1 3; done
    exec slurmd -D
    ;;
  slurmdbd)
    install -d -o mysql -g mysql /run/mysqld /run/mariadbd # the latter is sid's (MariaDB 11.8.9)
    [ -d /var/lib/mysql/mysql ] || mariadb-install-db --user=mysql > /dev/null
    runuser -u mysql -- mariadbd --skip-networking &
    for _ in $(seq 60); do mariadb -e 'select 1' > /dev/null 2>&1 && break; sleep 0.5; done
    mariadb -e "create database if not exists slurm_acct_db;
      create user if not exists slurm@localhost identified via unix_socket;
      grant all on slurm_acct_db.* to slurm@localhost"
    chown slurm:slurm /etc/slurm/slurmdbd.conf
    chmod 600 /etc/slurm/slurmdbd.conf # slurmdbd refuses any other
    exec slurmdbd -D
    ;;
  *) exec "$@" ;;
esac
