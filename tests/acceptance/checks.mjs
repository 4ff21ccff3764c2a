// What the scripts of all Node clients share: the same as checks.py.
import { appendFileSync, readFileSync } from "node:fs";

export const [URL_, MODEL_FOLDER, RESULTS] = process.argv.slice(2);
export const BASE = `${URL_}/v1`;
export const MODEL = "minisgl-demo";
export const SUM = "What is 12 + 30?";
export const WEATHER = "What is the weather in Paris?";
export const PERSON = "Extract name and age as JSON: Tom is 9 years old.";
export const RESULT = '{"temperature": 21, "sky": "sunny"}';
export const CITY = { type: "object", properties: { city: { type: "string" } }, required: ["city"], additionalProperties: false };

export function user(content) {
  return [{ role: "user", content }];
}

// The error that `call` raises.
export async function refused(call) {
  try {
    await call();
  } catch (e) {
    return e;
  }
  throw new Error("it was not refused");
}

// Runs every check and writes what came of it, beside the version of `package`.
export async function run(name, checks) {
  const { version } = JSON.parse(readFileSync(`node_modules/${name}/package.json`));
  for (const check of checks) {
    let error = "";
    try {
      await check();
    } catch (e) {
      error = String(e?.stack ?? e).slice(0, 2000);
      console.error(e);
    }
    appendFileSync(RESULTS, JSON.stringify({ check: check.name, version, error }) + "\n");
  }
}
