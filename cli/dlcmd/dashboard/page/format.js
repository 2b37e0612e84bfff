// Figures as text, as `dlcmd` writes them: a kB is 1,000 bytes.

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });

export const count = (value) => (value === null || value === undefined ? "–" : whole.format(value));

export const plural = (value, noun) => `${count(value)} ${noun}${value === 1 ? "" : "s"}`;

export function rate(value) {
  if (!value) return "0";
  return value < 9.95 ? value.toFixed(1) : whole.format(value);
}

export function bytes(value) {
  if (value === null || value === undefined) return "–";
  for (const unit of ["B", "kB", "MB", "GB"]) {
    if (value < 999.5) return unit === "B" ? `${value.toFixed(0)} B` : `${value.toFixed(1)} ${unit}`;
    value /= 1000;
  }
  return `${value.toFixed(1)} TB`;
}

export const percent = (share) => `${Math.round(100 * share)} %`;

export function duration(seconds) {
  if (seconds < 60) return `${Math.round(seconds)} s`;
  if (seconds < 3600) return `${Math.round(seconds / 60)} min`;
  if (seconds < 86400) return `${Math.floor(seconds / 3600)} h ${Math.round((seconds % 3600) / 60)} min`;
  return `${Math.floor(seconds / 86400)} d ${Math.round((seconds % 86400) / 3600)} h`;
}

export const clock = (seconds) =>
  new Date(1000 * seconds).toLocaleTimeString("en-GB", { hour: "2-digit", minute: "2-digit" });

export const moment = (seconds) => (seconds ? new Date(1000 * seconds).toLocaleString("sv-SE") : "–");
