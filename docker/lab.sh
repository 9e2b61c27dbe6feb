#!/usr/bin/env bash
# The Slurm lab; with ACCOUNTING=1 also slurmdbd; with HPCGPU_LAB=1 to 9 another one beside it; with DEBIAN=trixie
# or sid Slurm 24.11 or 26.05 in place of bookworm's 22.05.
# usage: docker/lab.sh base|build|up|down|shell|status; base: Debian's image alone. Exit code 3: it cannot be had on this machine.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
export DEBIAN=${DEBIAN:-bookworm}
base=debian:$DEBIAN-slim
[ "$DEBIAN" = bookworm ] || export SLURMD_CAP=SYS_ADMIN

die() { echo "slurm lab: $1" >&2; exit "${2:-1}"; }

compose() {
  local tool=(docker-compose)
  docker compose version > /dev/null 2>&1 && tool=(docker compose)
  command -v "${tool[0]}" > /dev/null || die "neither 'docker compose' nor 'docker-compose' is here. On Debian: apt-get install docker-compose" 3
  HPCGPU_IMAGE=$(image) "${tool[@]}" -p "hpcgpu${HPCGPU_LAB:-}" -f "$here/docker-compose.yml" ${ACCOUNTING:+-f "$here/accounting.yml"} "$@"
}

# What the image was made from; it names the volumes with its /opt and /usr/lib, which all labs have.
image() {
  local inputs
  inputs=$(docker image inspect -f '{{index .Config.Labels "hpcgpu.inputs"}}' "hpcgpu-slurm:$DEBIAN" 2> /dev/null) || inputs=none
  echo "$inputs"
}

need_docker() {
  command -v docker > /dev/null || die "docker is not installed" 3
  local why
  why=$(timeout 30 docker info 2>&1 > /dev/null) || die "docker does not answer: ${why:-no answer within 30 s}" 3
}

# Only where the base image can neither be found nor pulled: Debian's own tool makes the same system.
make_base() {
  docker image inspect "$base" > /dev/null 2>&1 && return
  echo "slurm lab: pulling $base"
  timeout 300 docker pull -q "$base" 2> /dev/null && return
  [ "$(id -u)" = 0 ] && command -v debootstrap > /dev/null ||
    die "$base is not here and cannot be pulled. As root and with debootstrap installed I make it from Debian's packages." 3
  local root mirror
  # Debian's one-line and deb822 formats; the first mirror of the host, if it is a Debian.
  mirror=$(sed -nE 's/^(deb (\[[^]]*\] )?|URIs: *)(https?:[^ ]*debian)\/?( .*)?$/\3/p' \
    /etc/apt/sources.list /etc/apt/sources.list.d/*.{list,sources} 2> /dev/null | head -n 1) || true
  root=$(mktemp -d)
  echo "slurm lab: $base cannot be pulled; making it with debootstrap (half a minute)"
  debootstrap --variant=minbase "$DEBIAN" "$root/fs" ${mirror:+"$mirror"} > "$root/log" 2>&1 ||
    { tail -n 20 "$root/log" >&2; rm -rf "$root"; die "debootstrap failed"; }
  rm -rf "$root"/fs/var/cache/apt/archives/*.deb "$root"/fs/var/lib/apt/lists/*
  tar -C "$root/fs" -c . | docker import - "$base" > /dev/null
  rm -rf "$root"
}

# A host's proxies, also apt's own, as docker's predefined arguments: they do not stay in the image.
proxies() {
  local name apt
  for name in http_proxy https_proxy no_proxy HTTP_PROXY HTTPS_PROXY NO_PROXY; do
    [ -z "${!name:-}" ] || echo "--build-arg=$name"
  done
  if [ -z "${http_proxy:-}" ] && command -v apt-config > /dev/null; then
    apt=$(apt-config dump --format '%v%n' Acquire::http::Proxy)
    [ -z "$apt" ] || echo "--build-arg=http_proxy=$apt"
  fi
}

# Build the stage $1 as image $2, unless what it is made from is as it was.
build_stage() {
  [ "$(docker image inspect -f '{{index .Config.Labels "hpcgpu.inputs"}}' "$2" 2> /dev/null)" != "$print" ] || return 0
  make_base
  echo "slurm lab: building $2 (minutes the first time)"
  # The steps are shown as they start, in the classic builder's words or BuildKit's.
  docker build --force-rm --network host --build-arg "DEBIAN=$DEBIAN" --target "$1" --label "hpcgpu.inputs=$print" -t "$2" "${args[@]}" "$context" 2>&1 |
    tee "$context/log" | sed -unE 's/^(Step [0-9]+\/[0-9]+ : |#[0-9]+ \[[^]]+\] )(.{0,90}).*/  \1\2/p' ||
    { tail -n 40 "$context/log" >&2; die "the image $2 could not be built"; }
}

# Docker fills a volume that is empty from the image; /opt gets its packages here. Those of earlier images go, unless a
# lab still has them.
fill_volumes() {
  local others
  volumes=("hpcgpu-opt-$print" "hpcgpu-lib-$print")
  mapfile -t others < <(docker volume ls -q -f name=hpcgpu-opt- -f name=hpcgpu-lib- | grep -e "-$DEBIAN\$" | grep -v -e "-$print\$")
  [ ${#others[@]} -eq 0 ] || docker volume rm "${others[@]}" > /dev/null 2>&1 || true
  ! docker volume inspect "${volumes[@]}" > /dev/null 2>&1 || return 0
  echo "slurm lab: installing Python's packages"
  # What was cut off is not taken for whole by the next build.
  trap 'rm -rf "$context"; docker volume rm -f "${volumes[@]}" > /dev/null' EXIT
  docker run --rm --init --network host -v "${volumes[0]}:/opt" -v "${volumes[1]}:/usr/lib" \
    -v "$context/build:/build:ro" "${args[@]/#--build-arg/--env}" "hpcgpu-slurm:$DEBIAN" sh /build/packages.sh > "$context/log" 2>&1 ||
    { tail -n 40 "$context/log" >&2; die "Python's packages could not be installed"; }
  trap 'rm -rf "$context"' EXIT
}

# One at a time, or each of those that start together builds the same image.
lock() { ! command -v flock > /dev/null || flock "$1"; }

build() {
  need_docker
  context=$(mktemp -d)
  trap 'rm -rf "$context"' EXIT
  print=$("${PYTHON:-python3}" "$here/context.py" "$context")-$DEBIAN
  mapfile -t args < <(proxies)
  exec 8< "$here/Dockerfile" 9< "$here/accounting.yml"
  lock 8
  build_stage node "hpcgpu-slurm:$DEBIAN"
  fill_volumes
  exec 8<&- # a lab without slurmdbd goes on
  [ -z "${ACCOUNTING:-}" ] || { lock 9; build_stage accounting "hpcgpu-slurmdbd:$DEBIAN"; }
  exec 9<&-
}

up() {
  build
  local out
  echo "slurm lab: starting the containers"
  out=$(compose up -d --remove-orphans 2>&1) || die "the containers did not start: $out"
  echo "slurm lab: waiting for the nodes"
  compose exec -T slurmctld bash -c '
    for i in $(seq 120); do
      [ "$(sinfo -h -N -t idle,mix,alloc -o %N 2> /dev/null | sort -u | wc -l)" = 4 ] && exit
      sleep 0.5
    done
    sinfo; exit 1' || die "the 4 nodes did not become ready within 60 s (see above)"
  [ -z "${ACCOUNTING:-}" ] || compose exec -T slurmctld sh -c '
    sacctmgr -i add account project && sacctmgr -i add user hpc account=project' > /dev/null || true # twice is an error
}

# In a home that all nodes share and can write; the checkout, which they read, is /opt/hpcgpu.
shell() {
  need_docker
  local terminal=()
  [ -t 0 ] || terminal=(-T)
  compose exec "${terminal[@]}" -u hpc -w /home/hpc slurmctld bash -lc '
    ln -sfn /opt/hpcgpu/examples examples && ln -sfn /opt/hpcgpu/jobscripts jobscripts
    [ ! -t 0 ] || cat << END
The login node of a Slurm cluster of 4 nodes (sinfo). hpcgpu is installed; examples/ and jobscripts/ are the checkout of
this project. Try, as in its README:
  sbatch jobscripts/slurm.sbatch --gpus sim:4 examples/svd.py; squeue; tail -F slurm-*.out
  salloc -N2 --ntasks-per-node=4 hpcgpu launch --gpus sim:4 examples/svd.py
END
    exec bash'
}

case "${1:-}" in
  base) need_docker; make_base ;;
  build) build ;;
  up) up; echo "slurm lab: 4 nodes with 4 GPUs each are up; 'make slurm-shell' is the login node" ;;
  down) need_docker; out=$(compose down -v --remove-orphans -t 3 2>&1) || die "could not be taken down: $out" ;;
  shell) shell ;;
  status) need_docker; compose ps; compose exec -T slurmctld sinfo ;;
  *) sed -n '2,4s/^# //p' "$0"; exit 2 ;;
esac
