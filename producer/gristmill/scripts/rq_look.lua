-- List the workers of an RQ queue that may be dead.
--
-- KEYS  1     processes of the queue's workers
-- ARGV  1     prefix of the keys of their signs of life
--       2     worker who asks
--       3     its host, boot and process namespace, '' = cannot be told
-- Returns per worker: name, process, and 1 if it gave no sign of life for a lease, or 0 if its process can be
-- looked up here.

local found = {}
local rows = redis.call('HGETALL', KEYS[1])
for i = 1, #rows, 2 do
  local name, process = rows[i], rows[i + 1]
  if name ~= ARGV[2] then
    if redis.call('EXISTS', ARGV[1] .. name) == 0 then
      for _, value in ipairs({ name, process, 1 }) do found[#found + 1] = value end
    elseif ARGV[3] ~= '' and string.sub(process, 1, #ARGV[3]) == ARGV[3] then
      for _, value in ipairs({ name, process, 0 }) do found[#found + 1] = value end
    end
  end
end
return found
