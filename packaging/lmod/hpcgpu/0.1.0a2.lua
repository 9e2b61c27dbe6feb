-- For Lmod. A site writes the folder of hpcgpu's environment (docs/how-to/operators.md) here; users: module load hpcgpu
local prefix = "/opt/hpcgpu"

help([[
A Dask cluster on the GPUs of a Slurm or PBS job.
hpcgpu demo; hpcgpu plan --gpus 8; hpcgpu --help
]])
whatis("Version: " .. myModuleVersion())
whatis("Description: a Dask cluster on the GPUs of a Slurm or PBS job, one bound worker per GPU")

if mode() == "load" and not isFile(pathJoin(prefix, "bin", "hpcgpu")) then
    LmodError("there is no " .. pathJoin(prefix, "bin", "hpcgpu") .. ": write the folder of hpcgpu's environment into "
        .. myFileName())
end
prepend_path("PATH", pathJoin(prefix, "bin"))
if isFile(pathJoin(prefix, "site.yaml")) then
    setenv("HPCGPU_SITE", pathJoin(prefix, "site.yaml"))
end
