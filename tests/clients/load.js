// A short load by k6, which finds the service by reflection: every iteration calls, streams, is
// refused, and gives up waiting.  A check that fails fails the run.
//
// The address is in the variable ADDRESS, and a bearer token may be in TOKEN.

import { check } from "k6";
import grpc from "k6/net/grpc";

const ITERATIONS = 20;
const METHOD = "custody.v1.GenerationService/Generate";
const UNARY = "custody.v1.GenerationService/Complete";

export const options = {
  scenarios: {
    few: { executor: "shared-iterations", vus: 2, iterations: ITERATIONS, maxDuration: "40s" },
  },
  thresholds: {
    checks: ["rate==1"],
    iterations: [`count==${ITERATIONS}`],
    grpc_streams_msgs_received: ["count>0"],
  },
  discardResponseBodies: false,
};

const client = new grpc.Client();
const metadata = __ENV.TOKEN ? { authorization: `Bearer ${__ENV.TOKEN}` } : {};

function body(tokens, newTokensMax) {
  return { tokenIds: { ids: Array(tokens).fill(5) }, sampling: { newTokensMax } };
}

function stream(request) {
  return new Promise((resolve) => {
    const call = new grpc.Stream(client, METHOD, { metadata, timeout: "10s" });
    const steps = [];
    let failed = null;
    call.on("data", (step) => steps.push(Object.keys(step)[0]));
    call.on("error", (error) => { failed = error; });
    call.on("end", () => resolve({ steps, failed }));
    call.write(request);
    call.end();
  });
}

function connect() {
  client.connect(__ENV.ADDRESS, { plaintext: true, reflect: true, reflectMetadata: metadata });
}

// k6 keeps the types that reflection finds in one registry for all users of a run, and panics when
// two register the same type at once (grafana/k6#3961), so one connection comes before all others.
export function setup() {
  connect();
  client.close();
}

export default async function () {
  if (__ITER === 0) {
    connect();
  }
  const called = client.invoke(UNARY, { generation: body(7, 4) }, { metadata, timeout: "10s" });
  check(called, {
    "a call is answered": (r) => r.status === grpc.StatusOK,
    "with all tokens": (r) => r.message.chunk.tokenIds.length === 4,
  });
  const refused = client.invoke(UNARY, { generation: body(5000, 4) }, { metadata, timeout: "10s" });
  const info = refused.error.details[0];
  check(refused, {
    "a long prompt is refused": (r) => r.status === grpc.StatusInvalidArgument,
    "with its reason": () => JSON.stringify(info).includes("CONTEXT_LENGTH_EXCEEDED"),
    "and its numbers": () => JSON.stringify(info).includes("5000"),
  });
  const { steps, failed } = await stream(body(7, 5));
  check(steps, {
    "a stream has no error": () => failed === null,
    "it begins with the admission": (s) => s[0] === "admission",
    "and ends with the outcome": (s) => s[s.length - 1] === "outcome",
    "with a chunk for each token": (s) => s.filter((kind) => kind === "chunk").length === 5,
  });
}
