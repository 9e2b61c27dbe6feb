"""Decide about jobs: one job, its end, its phase and its text for people."""

from hpcgpu.model.worker_names import by_number as by_number
from hpcgpu.plan.jobs.job import HEAD as HEAD
from hpcgpu.plan.jobs.job import MEMBER as MEMBER
from hpcgpu.plan.jobs.job import NO_WORKERS as NO_WORKERS
from hpcgpu.plan.jobs.job import Job as Job
from hpcgpu.plan.jobs.job import Phase as Phase
from hpcgpu.plan.jobs.job_end import may_answer as may_answer
from hpcgpu.plan.jobs.job_end import why_missing as why_missing
from hpcgpu.plan.jobs.job_text import OUTLIVES as OUTLIVES
from hpcgpu.plan.jobs.job_text import READY as READY
from hpcgpu.plan.jobs.job_text import End as End
from hpcgpu.plan.jobs.job_text import describe as describe
from hpcgpu.plan.jobs.job_text import format_end as format_end
from hpcgpu.plan.jobs.job_text import format_missing as format_missing
from hpcgpu.plan.jobs.job_text import note_lines as note_lines
from hpcgpu.plan.jobs.job_text import phases_line as phases_line
from hpcgpu.plan.jobs.job_text import summary_line as summary_line
