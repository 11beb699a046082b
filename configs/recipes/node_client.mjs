// Node.js, by producer/WIRE.md: `npm install redis`, and copy submit.lua and listen.lua from
// producer/gristmill/scripts beside this file. One per process and queue; any number of score() at once:
//
//   const mill = await connect("redis://localhost:6379/0", "topics");
//   console.log(await mill.score("A list can be sorted in place.", { top_k: 2 }));
//   await mill.close();
import { randomUUID } from "node:crypto";
import { readFileSync } from "node:fs";
import { setTimeout as sleep } from "node:timers/promises";
import { createClient } from "redis";

const lua = (name) => readFileSync(new URL(`${name}.lua`, import.meta.url), "utf8");
const [SUBMIT, LISTEN] = [lua("submit"), lua("listen")];
const failure = ({ code, message }) => Object.assign(new Error(message), { code });

export async function connect(url, queue) {
  const redis = await createClient({ url }).on("error", console.error).connect();
  const reader = await redis.duplicate().on("error", console.error).connect(); // blocks, so on its own
  const [client, waiting] = [`node-${randomUUID()}`, new Map()]; // request ID → what takes its result
  const key = (rest) => `gm:{${queue}}:${rest}`;
  let [last, reading] = ["0", false];
  await redis.sAdd("gm:queues", queue);

  async function listen() {
    const made = await redis.eval(LISTEN, { keys: [key(`reply:${client}`)], arguments: ["600", last] });
    if (made) last = "0";
    return made;
  }
  async function read() { // one for all that is awaited
    for (reading = true; waiting.size; ) {
      try {
        const made = await listen();
        const streams = await reader.xRead({ key: key(`reply:${client}`), id: last }, { BLOCK: 1000, COUNT: 100 });
        const entries = streams?.[0].messages ?? [];
        last = entries.at(-1)?.id ?? last;
        const results = entries.flatMap(({ message }) => JSON.parse(message.results ?? "[]"));
        if ((made || !streams) && waiting.size) { // the keys are the authority, the push is not
          const states = await redis.mGet([...waiting.keys()].map((id) => key(`result:${id}`)));
          results.push(...states.filter((state) => state?.startsWith("{")).map((state) => JSON.parse(state)));
        }
        for (const result of results) waiting.get(result.id)?.(result);
      } catch (error) {
        console.error(error);
        await sleep(100);
      }
    }
    reading = false;
  }
  async function score(text, options = {}, timeoutMs = 10_000) {
    const fields = { id: randomUUID(), body: JSON.stringify({ text, options }), reply: client };
    const more = { ttl: 60, deadline: Date.now() + timeoutMs }; // nothing runs for whom has left
    const names = ["requests", "requests:high", "requests:low", "config", `result:${fields.id}`];
    const values = ["100000", "604800", "5", ...Object.entries({ ...fields, ...more }).flat().map(String)];
    const submit = () => redis.eval(SUBMIT, { keys: names.map(key), arguments: values });
    const ask = async () => {
      const answer = new Promise((resolve) => waiting.set(fields.id, resolve));
      if (!reading) await listen(); // before submitting; read() does it afterwards
      const [outcome] = await submit().catch(submit); // what got no answer may be sent again
      if (outcome < 0) throw failure({ code: "queue_full", message: "send it again after a pause" });
      if (!reading) read();
      return answer;
    };
    const late = { error: { code: "timeout", message: `no result within ${timeoutMs} ms` } };
    try {
      const result = await Promise.race([ask(), sleep(timeoutMs, late, { ref: false })]);
      if (result.status !== "ok") throw failure(result.error);
      return result.value;
    } finally {
      waiting.delete(fields.id);
    }
  }
  return { score, close: () => Promise.all([redis.close(), reader.close()]) };
}
