-- Let go of a job that RQ's own code has finished.
--
-- KEYS  1     what this worker holds
--       2     RQ's registry of started jobs
-- ARGV  1     job:execution
-- Returns 1, or 0 if RQ's code did not get that far: the job still counts as started.

if redis.call('ZSCORE', KEYS[2], ARGV[1]) then return 0 end
redis.call('HDEL', KEYS[1], ARGV[1])
return 1
